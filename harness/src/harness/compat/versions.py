"""The tested versions of other packages, and their private names that the library uses.

With another version, a run logs a warning. If that version lacks a name, the run stops with an
error, because its results would be wrong. In a tested version no name is looked up. The list has:

- each name with an underscore that ``harness.compat`` uses, also as a string,
- each undocumented name without one that ``harness.compat`` only assigns or overrides, because
  Python itself raises no error if such a name is gone.

``harness/tests/compat/test_versions.py`` checks that no name of the first kind is missing here, and
that each name exists.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from packaging.specifiers import SpecifierSet

from harness.errors import UserError

if TYPE_CHECKING:  # importing it takes seconds
    import pytorch_lightning as pl

TESTED = {  # the same bounds as in requirements.txt
    "pytorch-lightning": ">=2.6.4,<2.7",
    "torch": ">=2.6,<2.14",
    "torchmetrics": ">=1.6,<1.10",
    "hydra-core": ">=1.3.6,<1.4",
}
warn_once = lru_cache(logging.getLogger(__name__).warning)


def private_names(trainer: pl.Trainer) -> list[tuple[Any, str]]:
    """Return objects of other packages, each with the private names that the library uses.

    The names of an object are one string, separated by spaces.
    """
    from multiprocessing.queues import Queue

    import pytorch_lightning as pl
    import torch
    from omegaconf.base import Container
    from pytorch_lightning.callbacks import WeightAveraging
    from pytorch_lightning.strategies.launchers import subprocess_script
    from pytorch_lightning.trainer.connectors.logger_connector import logger_connector
    from pytorch_lightning.utilities import CombinedLoader
    from torchmetrics import SumMetric

    from harness.compat.final_values import READS

    optimizer = torch.optim.SGD([torch.zeros(1)])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=2)
    return [
        (CombinedLoader([]), "_mode"),
        (Queue, "_on_queue_feeder_error"),
        (SumMetric(), "_computed _forward_cache _update_count"),
        (WeightAveraging(), "_average_model"),
        (torch.ops.aten.add_.Tensor, "_schema"),
        (pl.strategies.DDPStrategy(), "_ddp_comm_hook"),
        (torch.zeros(1), "_backward_hooks _post_accumulate_grad_hooks _version"),
        (pl.LightningModule(), "_call_impl _compiled_call_impl _current_fx_name _device"),
        (schedule, "_schedule_phases"),
        (subprocess_script, "_launch_process_observer subprocess"),
        (torch._dynamo.config, "cache_size_limit"),
        (trainer, "_logger_connector _signal_connector"),
        (trainer._signal_connector, "register_signal_handlers"),
        (trainer._logger_connector, "_first_loop_iter"),
        (trainer.fit_loop, "_should_accumulate"),
        (trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor _batches_that_stepped _results"),
        (trainer.fit_loop.epoch_loop._results, "_get_cache _forked_name"),
        (trainer.fit_loop.epoch_progress.current, "completed"),
        (logger_connector, "_LoggerConnector"),
        (logger_connector._LoggerConnector, f"metrics {READS}"),
        (trainer.fit_loop, "_data_source"),
        (Container, "resolve_parse_tree"),
    ]


@lru_cache
def untested() -> list[str]:
    """Return the packages whose installed version was not tested."""
    allowed = {name: SpecifierSet(bounds) for name, bounds in TESTED.items()}
    return [n for n, bounds in allowed.items() if not bounds.contains(version(n), prereleases=True)]


def check(trainer: pl.Trainer) -> None:
    """Warn of untested versions. Call it before the Trainer runs.

    Raises:
        UserError: an untested version lacks a private name that the library needs.
    """
    if not untested():
        return
    try:
        for holder, names in private_names(trainer):
            for name in names.split():
                getattr(holder, name)
    except (AttributeError, ImportError) as error:
        refuse(error)
    if trainer.is_global_zero:
        installed, install = installed_and_cure()
        warn_once(
            f"{installed} was not tested. Run {install}, or test this version: pytest "
            "harness/tests/compat."
        )


def refuse(error: Exception) -> NoReturn:
    """Raise a ``UserError`` if an untested version may lack a name, or else the error itself."""
    if not untested():
        raise error
    installed, install = installed_and_cure()
    raise UserError(
        f"{installed} cannot be used: {error}. Without this name, results would be wrong.\nRun "
        f"{install}."
    ) from error


def installed_and_cure() -> tuple[str, str]:
    """Return the untested packages with their versions, and a command that installs tested ones."""
    installed = " and ".join(f"{name} {version(name)}" for name in untested())
    bounds = " ".join(f"'{name}{TESTED[name]}'" for name in untested())
    return installed, f"pip install {bounds}"
