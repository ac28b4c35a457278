"""ddp that follows frozen and thawed parts.

torch's DDP averages the gradients of what is trainable when it wraps the model. Parts that are
thawed later would be trained by each process for itself; for those that are frozen later it would
wait. So the model is wrapped anew before a step, where hooks such as those of ``BaseFinetuning``
have frozen or thawed parameters. Where one process does that alone, torch's collectives do not
match, which is an error of theirs.
"""

from typing import Any

from pytorch_lightning import strategies
from torch import Tensor, nn

from harness.errors import UserError


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's strategy, which wraps the model anew where training changes what is trained.

    With ``find_unused_parameters`` DDP goes without frozen parameters by itself, and they stay
    wrapped: a step may thaw them again, as those of GANs do.
    """

    parameters: tuple[nn.Parameter, ...] = ()
    averaged: frozenset[nn.Parameter] = frozenset()  # those whose gradients DDP averages
    flags: list[bool] | None = None  # requires_grad of the parameters before the last step
    is_wrapping = False

    def configure_ddp(self) -> None:
        """Wrap the model, and note whose gradients are averaged."""
        self.is_wrapping = True
        super().configure_ddp()
        self.is_wrapping = False
        self._list_parameters()
        self.averaged = frozenset(p for p in self.parameters if p.requires_grad)

    def determine_ddp_device_ids(self) -> list[int] | None:
        """Return the device for NCCL's barriers, and none for DDP, which is where its module is.

        For a device Lightning 2.6 builds DDP on another stream than that of the steps: torch then
        warns that the gradients are accumulated on it, and synchronises both (Lightning #21567).
        """
        return None if self.is_wrapping else super().determine_ddp_device_ids()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Wrap the model anew, after all hooks, if other parameters are trained from here on."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:  # finding new parameters takes longer than comparing flags
            self._list_parameters()
        elif self._flags() == self.flags:
            return
        self.flags = self._flags()
        trained = {p for p in self.parameters if p.requires_grad}
        wrapper: Any = self.model
        if wrapper.find_unused_parameters:
            trained |= self.averaged.intersection(self.parameters)
        if trained == self.averaged or not trained:
            return
        if batch_idx % wrapper.module.trainer.accumulate_grad_batches:
            raise self._refusal("between accumulated batches")
        self.wrap_anew()

    def wrap_anew(self) -> None:
        """Replace DDP's wrapper, which forgets what it has noted of the parameters."""
        wrapper: Any = self.model
        wrapper.reducer = wrapper.logger = None  # removes its hooks from the parameters
        self.model = wrapper.module
        self.configure_ddp()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Refuse a gradient that DDP would leave to each process."""
        if self._flags() != self.flags and any(
            p.requires_grad and p not in self.averaged for p in self.parameters
        ):
            raise self._refusal("in the middle of a step")
        super().pre_backward(closure_loss)

    def _list_parameters(self) -> None:
        assert self.lightning_module is not None
        self.parameters = tuple(self.lightning_module.parameters())

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters]

    def _refusal(self, when: str) -> UserError:
        assert self.lightning_module is not None
        return UserError(
            f"Step {self.lightning_module.global_step}: parameters were frozen or unfrozen {when}: "
            "DDP would not average their gradients. Do it before the step in every process, in "
            "on_train_epoch_start or on_train_batch_start, where batch_idx is a multiple of "
            "trainer.accumulate_grad_batches."
        )
