"""The callback that checks a run's first batches.

In: the run's trainer and module, before its first step. Out: one warning of each kind. The first
process computes, in a fork if it trains on a CPU; the others wait in their next collective
operation. Next: `first_batch_check.py` has what is computed; a run of one share does not import it.
"""

import logging
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch

from harness.errors import UserError
from harness.processes.leaving import be_data_worker

log = logging.getLogger(__name__)
EVERY_N_BATCHES = 16  # how often to look whether parameters were frozen or thawed


class FirstBatchCheck(pl.Callback):
    """Check the first batches of a run on several devices, or of one that accumulates.

    It checks before the first step, in the second epoch, and after parameters were frozen or
    thawed.
    """

    def __init__(self) -> None:
        self.findings: dict[str, str] = {}  # that were logged, by kind
        self.flags: list[bool] = []  # of parameters, whether they trained at the last check
        self.has_checked_again = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check in the strategy's hook: it is called after all hooks of callbacks and module."""
        num_shares = trainer.world_size * trainer.num_devices * int(trainer.accumulate_grad_batches)
        if not trainer.is_global_zero or num_shares == 1:
            return
        strategy: Any = trainer.strategy
        original = strategy.on_train_batch_start

        def on_train_batch_start(batch: Any, batch_idx: int) -> None:
            original(batch, batch_idx)
            if batch_idx % EVERY_N_BATCHES == 0:
                self._check_what_is_new(trainer, pl_module, batch_idx)

        strategy.on_train_batch_start = on_train_batch_start

    def on_train_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Give the strategy its own method back."""
        vars(trainer.strategy).pop("on_train_batch_start", None)

    on_exception = on_train_end

    def _check_what_is_new(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch_idx: int
    ) -> None:
        flags = [parameter.requires_grad for parameter in module.parameters()]
        is_first = not self.flags
        is_second_epoch = not is_first and batch_idx == 0 and not self.has_checked_again
        if flags == self.flags and not is_second_epoch:
            return
        from harness.exact.first_batch_check import check_first_batch

        self.flags, self.has_checked_again = flags, is_second_epoch
        num_parts = 2 if trainer.world_size * int(trainer.accumulate_grad_batches) > 1 else 1
        split_calls = getattr(trainer.strategy, "split_calls", None)
        check = partial(check_first_batch, module, trainer.train_dataloader, num_parts, split_calls)
        for kind, sentence in (check() if module.device.type != "cpu" else in_child(check)).items():
            if kind not in self.findings and (kind != "unchecked" or is_first):
                self.findings[kind] = sentence
                log.warning("%s", sentence)


def in_child(check: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Check in a fork of this process, so that nothing that the steps change stays.

    The child has one thread, because a fork does not have OpenMP's. A ``UserError`` of the module's
    step is raised here.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(check, sender))
    child.start()
    sender.close()
    try:
        result: dict[str, str] | UserError = receiver.recv()
    except EOFError:
        from harness.exact.first_batch_check import UNCHECKED

        child.join()
        why = f"its process has ended with {child.exitcode}"
        return {"unchecked": UNCHECKED.format("the module", why)}
    child.join()
    if isinstance(result, UserError):
        raise result
    return result


def _send(check: Callable[[], dict[str, str]], sender: Any) -> None:
    be_data_worker()
    torch.set_num_threads(1)
    try:
        sender.send(check())
    except UserError as error:
        sender.send(error)
