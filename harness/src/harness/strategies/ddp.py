"""ddp for modules whose hooks freeze or unfreeze parameters during training.

torch's DDP averages the gradients of the parameters that are trainable when it wraps the model. It
would not average gradients of parameters that are unfrozen later, and would wait for gradients of
parameters that are frozen later. So this strategy wraps the model again before a step, if hooks
such as those of ``BaseFinetuning`` have changed which parameters are trained. All ranks must
change the same parameters: otherwise torch raises an error, because its collectives do not match.
"""

from typing import Any

from pytorch_lightning import strategies
from torch import Tensor, nn

from harness.errors import UserError


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's strategy, which wraps the model again when the trained parameters change.

    With ``find_unused_parameters``, DDP does not wait for frozen parameters. Such parameters stay
    in ``averaged``, because a later step may unfreeze them, as a GAN's steps do.
    """

    parameters: tuple[nn.Parameter, ...] = ()
    averaged: frozenset[nn.Parameter] = frozenset()  # parameters whose gradients DDP averages
    requires_grad: list[bool] | None = None  # of each parameter, before the last step
    is_wrapping = False

    def configure_ddp(self) -> None:
        """Wrap the model, and keep the set of parameters whose gradients DDP averages."""
        self.is_wrapping = True
        super().configure_ddp()
        self.is_wrapping = False
        self._list_parameters()
        self.averaged = frozenset(p for p in self.parameters if p.requires_grad)

    def determine_ddp_device_ids(self) -> list[int] | None:
        """Return the device ids for NCCL's barriers; ``None`` while DDP wraps the model.

        With device ids, Lightning 2.6 builds DDP on another CUDA stream than that of the steps.
        torch then warns about gradients on that stream, and synchronises both streams (Lightning
        #21567). Without ids, DDP uses the device of its module.
        """
        return None if self.is_wrapping else super().determine_ddp_device_ids()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Wrap the model again, after all hooks, if they changed which parameters are trained."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:  # only once per epoch, because listing the parameters is slower
            self._list_parameters()
        elif self._requires_grad() == self.requires_grad:
            return
        self.requires_grad = self._requires_grad()
        trained = {p for p in self.parameters if p.requires_grad}
        wrapper: Any = self.model
        if wrapper.find_unused_parameters:
            trained |= self.averaged.intersection(self.parameters)
        if trained == self.averaged or not trained:
            return
        if batch_idx % wrapper.module.trainer.accumulate_grad_batches:
            raise self._refusal("between accumulated batches")
        self.rewrap()

    def rewrap(self) -> None:
        """Replace DDP's wrapper by a new one, which lists the trained parameters again."""
        wrapper: Any = self.model
        wrapper.reducer = wrapper.logger = None  # removes its hooks from the parameters
        self.model = wrapper.module
        self.configure_ddp()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Raise an error if DDP would not average the gradient of a trained parameter."""
        if self._requires_grad() != self.requires_grad and any(
            p.requires_grad and p not in self.averaged for p in self.parameters
        ):
            raise self._refusal("in the middle of a step")
        super().pre_backward(closure_loss)

    def _list_parameters(self) -> None:
        assert self.lightning_module is not None
        self.parameters = tuple(self.lightning_module.parameters())

    def _requires_grad(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters]

    def _refusal(self, when: str) -> UserError:
        assert self.lightning_module is not None
        return UserError(
            f"Step {self.lightning_module.global_step}: a hook froze or unfroze parameters "
            f"{when}, so DDP would not average their gradients.\nFreeze and unfreeze on every "
            "rank in on_train_epoch_start, or in on_train_batch_start if batch_idx is a multiple "
            "of trainer.accumulate_grad_batches."
        )
