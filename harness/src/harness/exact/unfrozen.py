import logging
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning import strategies
from torch import Tensor, nn

from harness.errors import TrainingError, UserError
from harness.processes.agreement import gather

log = logging.getLogger(__name__)

# A process that freezes or unfreezes waits for the others as long to do the same.
PATIENCE_SECONDS = 1500.0  # somewhat less than DDP's own half an hour


class DDPStrategy(strategies.DDPStrategy):
    """DDP that averages the gradients of what is trained, also where training changes what that is.

    torch's DDP averages what is trainable when the model is wrapped: what is unfrozen later each
    process would train for itself, and for what is frozen later it would wait. So before a step
    the model is wrapped anew where hooks have frozen or unfrozen parameters, as ``BaseFinetuning``
    does. With ``find_unused_parameters`` DDP goes without what is frozen by itself, and keeps it:
    a step may unfreeze it again, as those of GANs do.
    """

    named: dict[str, nn.Parameter]
    averaged: frozenset[nn.Parameter] = frozenset()  # whose gradients DDP averages
    flags: list[bool] | None = None  # requires_grad of those that are named, at the last look
    group: Any = None  # of all processes, for a question that some of them may not ask

    def configure_ddp(self) -> None:
        """Wrap the model, and learn what is averaged."""
        super().configure_ddp()
        self._name_parameters()
        self.averaged = frozenset(p for p in self.named.values() if p.requires_grad)
        if self.group is None and self.world_size > 1:
            patience = timedelta(seconds=PATIENCE_SECONDS)
            self.group = dist.new_group(backend="gloo", timeout=patience)

    def teardown(self) -> None:
        """Forget the run's parameters and processes."""
        super().teardown()
        self.named, self.averaged, self.group = {}, frozenset(), None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """After all hooks and before the step: wrap anew where something else is trained."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:  # to look for new parameters takes longer than to look at these
            self._name_parameters()
        elif self._flags() == self.flags:
            return
        self.flags = self._flags()
        expected = {p for p in self.named.values() if p.requires_grad}
        if self.model.find_unused_parameters:  # type: ignore[union-attr]
            expected |= self.averaged.intersection(self.named.values())
        if expected == self.averaged or not expected:
            return
        self._compare_processes(expected)
        trainer = self._trainer()
        if batch_idx % trainer.accumulate_grad_batches:
            raise UserError(
                f"Step {trainer.global_step}: parameters were frozen or unfrozen between the "
                "batches that are accumulated for one step, and their gradients would not be "
                "averaged.\nFreeze and unfreeze where a step begins: "
                "if batch_idx % self.trainer.accumulate_grad_batches == 0"
            )
        self._wrap_anew(expected)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Refuse a gradient that DDP would leave to each process."""
        for name, parameter in self.named.items() if self._flags() != self.flags else ():
            if parameter.requires_grad and parameter not in self.averaged:
                raise UserError(
                    f"Step {self._trainer().global_step}: {name} was unfrozen in the middle of a "
                    "step, and DDP would not average its gradient over the processes.\n"
                    "Unfreeze it before the step: in on_train_batch_start or on_train_epoch_start."
                )
        super().pre_backward(closure_loss)

    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _name_parameters(self) -> None:
        assert self.lightning_module is not None
        self.named = dict(self.lightning_module.named_parameters())

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.named.values()]

    def _wrap_anew(self, expected: set[nn.Parameter]) -> None:
        """Let DDP average the gradients of these parameters; all processes call it."""
        wrapper: Any = self.model
        wrapper.reducer = wrapper.logger = None  # its hooks on the parameters end with it
        self.model = wrapper.module
        frozen = [parameter for parameter in expected if not parameter.requires_grad]
        if self.root_device.type == "cuda":  # DDP is built on another stream, and takes gradients
            torch.cuda.synchronize(self.root_device)
        for parameter in frozen:
            parameter.requires_grad_(True)
        self.configure_ddp()
        for parameter in frozen:
            parameter.requires_grad_(False)
        if self.root_device.type == "cuda":
            torch.cuda.synchronize(self.root_device)

    def _compare_processes(self, expected: set[nn.Parameter]) -> None:
        """Refuse what only some processes have frozen or unfrozen.

        Raises:
            TrainingError: names a parameter and the ranks.
        """
        trainer, end = self._trainer(), ""
        changed = {n for n, p in self.named.items() if (p in expected) != (p in self.averaged)}
        try:
            everyone = gather(trainer, changed, self.group)
        except RuntimeError:  # of gloo: the others train on, and wait in their step
            everyone = [changed if r == self.global_rank else set() for r in range(self.world_size)]
            end = f"\nOr another process has ended, or came {PATIENCE_SECONDS:.0f} s later."
        differing = set.union(*everyone) - set.intersection(*everyone)
        if not differing:
            return
        name = min(differing)
        ranks = ", ".join(str(rank) for rank, names in enumerate(everyone) if name in names)
        message = (
            f"Step {trainer.global_step}: {name} was frozen or unfrozen on rank {ranks} alone, so "
            "that the replicas would differ.\nDo it in every process at the same step: not under "
            f"`if rank == 0`, nor by what one process has seen.{end}"
        )
        if end or trainer.is_global_zero:
            log.error(message)
        raise TrainingError(message)
