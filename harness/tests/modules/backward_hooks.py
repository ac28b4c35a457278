"""Own backward passes, and hooks on gradients, which act before an all-reduce."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.modules.classifiers import Classifier


class ExtraInBackward(Classifier):
    """Adds a term in ``backward`` that the loss has not: the spread of a batch's outputs."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        self.extra = self.extra_of(logits)
        return F.cross_entropy(logits, y)

    def extra_of(self, logits: Tensor) -> Tensor:
        return 0.3 * logits.std(0).mean()

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        (loss + self.extra).backward()


class CovarianceInBackward(ExtraInBackward):
    """The same with a covariance that a single sample has as well (decorrelation)."""

    def extra_of(self, logits: Tensor) -> Tensor:
        centred = logits - logits.mean(0)
        return 0.3 * (centred.T @ centred / len(logits)).square().sum()


class SumInBackward(ExtraInBackward):
    """The same with a sum over samples."""

    def extra_of(self, logits: Tensor) -> Tensor:
        return 0.01 * logits.square().sum()


class MeanInBackward(ExtraInBackward):
    """The same with a mean over samples, to which no batch's weight is applied."""

    def extra_of(self, logits: Tensor) -> Tensor:
        return 0.1 * logits.square().mean()


class LossHook(Classifier):
    """Divides the gradient by the loss, in a hook on it."""

    def on_before_backward(self, loss: Tensor) -> None:
        size = loss.detach().clone()
        loss.register_hook(lambda gradient: gradient / size)


class ParameterHooks(Classifier):
    """Hooks on each parameter."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(self.changed)

    def changed(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.003, 0.003)


class ClippedTensors(ParameterHooks):
    """Clips each tensor's norm."""

    def changed(self, gradient: Tensor) -> Tensor:
        return gradient * (0.02 / gradient.norm()).clamp(max=1)


class SignedGradients(ParameterHooks):
    """Takes the sign of each gradient, with a softened zero."""

    rate = 0.03

    def changed(self, gradient: Tensor) -> Tensor:
        return (gradient / 0.001).tanh()


class NoisyGradients(ParameterHooks):
    """Adds noise to gradients."""

    def changed(self, gradient: Tensor) -> Tensor:
        return gradient + 0.01 * torch.randn_like(gradient)


class ZeroedNans(ParameterHooks):
    """Replaces what is not finite, which never is there: it is right."""

    def changed(self, gradient: Tensor) -> Tensor:
        return gradient.nan_to_num(0.0)


class PostAccumulate(Classifier):
    """Clamps gradients as soon as they are there."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.change)

    def change(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.003, 0.003)


class PostAccumulateNorm(PostAccumulate):
    """Normalises gradients as soon as they are there."""

    def change(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(parameter.grad.norm() + 0.1)


class OutputHook(Classifier):
    """Normalises the gradient of its outputs over the batch."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient / (gradient.norm() + 0.1))
        return F.cross_entropy(logits, y)


class ModuleHook(Classifier):
    """Centres the gradient of a layer's input over the batch, in a full backward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_full_backward_hook(
            lambda _, before, __: tuple(gradient - gradient.mean(0) for gradient in before)
        )


class Centralised(torch.autograd.Function):
    """Passes its input on, and a gradient without its mean over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(0)


class OwnFunction(Classifier):
    """The same by a function of its own."""

    def forward(self, x: Tensor) -> Any:
        return self.net[2](Centralised.apply(self.net[:2](x)))


class AfterBackward(Classifier):
    """Clamps gradients behind the all-reduce: it is right."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.003, 0.003)


class BeforeStep(Classifier):
    """Clips gradients before the optimizer: it is right."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
