"""ddp that follows frozen and thawed parts.

torch's DDP averages the gradients of what is trainable when it wraps the model. Parts that are
thawed later would be trained by each process for itself; for those that are frozen later it would
wait. So the model is wrapped anew before a step, where hooks such as those of ``BaseFinetuning``
have frozen or thawed parameters; in all processes, or the run ends with a sentence.
"""

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

# How long a process that freezes or thaws waits for the others; below DDP's own half an hour.
PATIENCE_SECONDS = 1500.0
WHERE = "freeze and thaw in on_train_epoch_start or on_train_batch_start, in every process."


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's strategy, which wraps the model anew where training changes what is trained.

    With ``find_unused_parameters`` DDP goes without frozen parameters by itself, and they stay
    wrapped: a step may thaw them again, as those of GANs do.
    """

    named: dict[str, nn.Parameter]
    averaged: frozenset[nn.Parameter] = frozenset()  # parameters whose gradients DDP averages
    flags: list[bool] | None = None  # requires_grad of the named parameters before the last step
    group: Any = None  # for a question that only processes with a change ask

    def configure_ddp(self) -> None:
        """Wrap the model, and note whose gradients are averaged."""
        super().configure_ddp()
        self._name_parameters()
        self.averaged = frozenset(p for p in self.named.values() if p.requires_grad)
        if self.group is None and self.world_size > 1:
            timeout = timedelta(seconds=PATIENCE_SECONDS)
            self.group = dist.new_group(backend="gloo", timeout=timeout)

    def teardown(self) -> None:
        """Forget the run's parameters and processes."""
        super().teardown()
        self.named, self.averaged, self.group = {}, frozenset(), None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Wrap the model anew, after all hooks, if other parameters are trained from here on."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:  # finding new parameters takes longer than comparing flags
            self._name_parameters()
        elif self._flags() == self.flags:
            return
        self.flags = self._flags()
        trained = {p for p in self.named.values() if p.requires_grad}
        wrapper: Any = self.model
        if wrapper.find_unused_parameters:
            trained |= self.averaged.intersection(self.named.values())
        if trained == self.averaged or not trained:
            return
        changed = {n for n, p in self.named.items() if (p in trained) != (p in self.averaged)}
        self._compare_processes(changed)
        if batch_idx % self._trainer().accumulate_grad_batches:
            raise UserError(
                f"{self._step()}: parameters were frozen or unfrozen between batches that are "
                "accumulated: do it if batch_idx % self.trainer.accumulate_grad_batches == 0."
            )
        wrapper.reducer = wrapper.logger = None  # removes its hooks from the parameters
        self.model = wrapper.module
        self._synchronize()  # Lightning builds DDP on another stream
        self.configure_ddp()
        self._synchronize()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Refuse a gradient that DDP would leave to each process."""
        for name, parameter in self.named.items() if self._flags() != self.flags else ():
            if parameter.requires_grad and parameter not in self.averaged:
                raise UserError(
                    f"{self._step()}: {name} was unfrozen in the middle of a step, and DDP would "
                    f"not average its gradient. Unfreeze it before the step: {WHERE}"
                )
        super().pre_backward(closure_loss)

    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _step(self) -> str:
        return f"Step {self._trainer().global_step}"

    def _name_parameters(self) -> None:
        assert self.lightning_module is not None
        self.named = dict(self.lightning_module.named_parameters())

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.named.values()]

    def _synchronize(self) -> None:
        if self.root_device.type == "cuda":
            torch.cuda.synchronize(self.root_device)

    def _compare_processes(self, changed: set[str]) -> None:
        """Refuse a change of parameters that only some processes have made; they alone call it."""
        try:
            everyone = gather(self._trainer(), changed, self.group)
        except RuntimeError:  # the others train on, without this question, or have ended
            everyone = [changed, set()]
        if differing := set.union(*everyone) - set.intersection(*everyone):
            what = f"{self._step()}: {min(differing)} was frozen or unfrozen, not on every rank"
            log.error("%s: %s", what, WHERE)
            raise TrainingError(f"{what}: {WHERE}")
