"""Lists that a module fills in an evaluation are those of one process, in its order."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed
import torch.distributed as dist

from harness.exact import collected
from harness.exact.collected import CollectedLists, gathers_itself


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.history = ["of an earlier epoch"]
        self.outputs: dict[str, list[Any]] = {"predictions": []}
        self._private: list[int] = []
        self.not_picklable: list[Any] = []


def evaluate(rank: int, num_processes: int, num_batches: int, step: Any) -> CollectedLists:
    """Batches in turn, as processes take them; the last turn may have a filler."""
    module = Module()
    lists = CollectedLists(module)
    for turn in range(-(-num_batches // num_processes)):
        number = turn * num_processes + rank
        is_filler = number >= num_batches
        lists.begin_batch(is_filler)
        step(module, turn * num_processes if is_filler else number)
    return lists


def gathered(everyone: list[CollectedLists], monkeypatch: pytest.MonkeyPatch) -> list[Module]:
    sent: list[Any] = []
    monkeypatch.setattr(collected, "gather", lambda trainer, mine, group: sent.append(mine) or [])
    for lists in everyone:
        lists.gather(None, None)
    monkeypatch.setattr(collected, "gather", lambda trainer, mine, group: sent)
    for lists in everyone:
        lists.begin_batch(False)  # nothing grows
        lists.gather(None, None)
    return [lists.module for lists in everyone]


@pytest.mark.parametrize(("num_processes", "num_batches"), [(2, 5), (3, 1)])
def test_all_have_everything_in_the_order_of_one(num_processes, num_batches, monkeypatch) -> None:
    def step(module: Module, number: int) -> None:
        module.outputs["predictions"].append(torch.tensor([number]))
        module._private += [number, number + 100] if number % 2 else []
        module.history.append(str(number))
        module.not_picklable.append(lambda: number)

    everyone = [evaluate(rank, num_processes, num_batches, step) for rank in range(num_processes)]
    for module in gathered(everyone, monkeypatch):
        numbers = list(range(num_batches))
        assert torch.cat(module.outputs["predictions"]).tolist() == numbers
        assert module._private == [n for k in numbers if k % 2 for n in (k, k + 100)]
        assert module.history == ["of an earlier epoch", *map(str, numbers)]


def test_what_is_cleared_meanwhile_is_left_alone(monkeypatch) -> None:
    def step(module: Module, number: int) -> None:
        module._private.append(number)
        if number == 2:
            module._private.clear()

    everyone = [evaluate(rank, 2, 6, step) for rank in range(2)]
    first, second = gathered(everyone, monkeypatch)
    assert first._private == [4]
    assert second._private == [1, 3, 5]


class ByModule(pl.LightningModule):
    def on_validation_epoch_end(self) -> None:
        self.gathered()

    def gathered(self) -> None:
        if torch.distributed.is_initialized():
            [dist.all_gather_object([], part) for part in self.outputs]


def test_modules_that_gather_themselves_are_known() -> None:
    hook = "on_validation_epoch_end"
    assert gathers_itself(ByModule(), hook)
    assert not gathers_itself(Module(), hook)
