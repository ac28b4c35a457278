"""What an evaluation gathers by itself is refused before anybody waits."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from harness.errors import UserError
from harness.exact.gathering import Gathering
from tests.strategy_runs import free_port, in_processes


def reduced() -> torch.Tensor:
    mean = torch.ones(1)
    dist.all_reduce(mean)
    return mean


def made() -> Any:
    """Of the one process of a group, whose collectives return at once: nothing can hang here."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    module = pl.LightningModule()
    strategy = SimpleNamespace(model=module, all_gather=None, validation_step=reduced, test_step=1)
    trainer: Any = SimpleNamespace(
        strategy=strategy, training=False, testing=False, world_size=1, train_dataloader=None
    )
    return Gathering(trainer, module)


def of_a_step() -> None:
    gathering = made()
    assert gathering.trainer.strategy.validation_step() == 1
    gathering.is_alone = True
    with pytest.raises(UserError, match="some of them have one batch less"):
        gathering.trainer.strategy.validation_step()


def of_a_hook() -> None:
    gathering = made()
    module = gathering.module
    for hook in (lambda: None, reduced):  # of two evaluations
        module.outputs, module.on_validation_epoch_end = [], hook
        for batch_idx in range(2):
            gathering.begin_batch(None, batch_idx, 0)
            module.outputs.append(torch.ones(2))
        gathering.gather_lists()
        assert gathering.all_gather(torch.ones(2)).shape == (2,)
        is_refused = pytest.raises(UserError, match="the lists of the module already hold")
        with is_refused if hook is reduced else nullcontext():
            module.on_validation_epoch_end()


def test_a_collective_of_a_step_is_refused_where_others_have_no_batch() -> None:
    in_processes(1, of_a_step)


def test_what_was_gathered_is_not_gathered_again() -> None:
    """By the author's own code, that is: a library knows what it gathers."""
    in_processes(1, of_a_hook)
