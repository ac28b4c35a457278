"""What a loss is a mean over, found by taking the shares of a batch apart."""

from typing import Any

import torch
from torch import Tensor

from harness.exact.denominators import heard_by
from harness.prove.restoring import unchanged

NUM_SEEDS = 16  # of a step that draws at random


def kind_of_loss(steps: Any) -> dict[str, Any]:
    """How the loss of a batch comes from those of its shares.

    Returns:
        ``kind``: ``mean`` over samples, or over what ``mean_over`` was told; ``sum`` of them;
        ``weighted``: a mean over something else; ``means``:
        it does not change where the batch is doubled, but is no single mean; ``coupled``: it looks
        at the batch as a whole; ``random`` where that cannot be told. ``declared``: whether
        ``mean_over`` was called.
    """
    indices = steps.indices
    n = len(indices)
    if not steps.is_known or n < 2:
        return {"kind": "unknown"}
    bound = 1e-7 if steps.parameters[0].dtype == torch.float64 else 2e-3
    loss, whole = steps.gradient(indices)
    again, other = steps.gradient(indices, seed=1)
    if _far(whole, other) > bound or abs(loss - again) > bound * max(1.0, abs(loss)):
        return _of_random(steps)
    pairs = [(indices[:cut], indices[cut:]) for cut in sorted({n // 2, max(1, n // 3), 1})]
    parts = [(steps.gradient(one)[1], steps.gradient(two)[1]) for one, two in pairs]
    declared = [_declared(steps, pair) for pair in pairs]
    is_declared = declared[0] is not None
    by_samples = [len(one) / n for one, _ in pairs]
    exact = [_far(whole, a * p + b * (1 - p)) for p, (a, b) in zip(by_samples, parts, strict=True)]
    if is_declared:
        exact = [_far(whole, d) for d in declared if d is not None]
    if max(exact) <= bound:
        return {"kind": "mean", "declared": is_declared}
    if max(_far(whole, a + b) for a, b in parts) <= bound:
        return {"kind": "sum", "declared": is_declared}
    shares = [_share_of_first(whole, a, b) for a, b in parts]
    rest = max(_far(whole, a * p + b * (1 - p)) for p, (a, b) in zip(shares, parts, strict=True))
    if rest <= bound:
        samples = [len(x) for x in pairs[0]]
        return {"kind": "weighted", "declared": is_declared, "samples": samples, "share": shares[0]}
    twice, doubled = steps.gradient([*indices, *indices])
    is_same = _far(whole, doubled) <= bound and abs(twice - loss) <= bound * max(1, abs(loss))
    kind = "means" if is_same and is_separable(steps, bound) else "coupled"
    return {"kind": kind, "declared": is_declared, "by": max(exact)}


def is_separable(steps: Any, bound: float) -> bool:
    """Whether a sample's part of the gradient is the same whatever the others' outputs are.

    So it is for sums of means, and not for what compares samples with each other.
    """
    one, two = (_gradient_of_first(steps, change) for change in (0.0, 0.5))
    if one is None or two is None:
        return True  # nothing speaks against it
    return bool((one - two).norm() <= 100 * bound * one.norm())


def _gradient_of_first(steps: Any, change: float) -> Tensor | None:
    """The gradient at a sample's output of the network where the others' outputs are changed."""
    batch, n = steps.read(steps.indices), len(steps.indices)
    outputs: list[Tensor] = []

    def alter(module: Any, args: Any, output: Any) -> Any:
        if outputs or not isinstance(output, Tensor) or not output.dim() or len(output) != n:
            return None
        factors = torch.full_like(output, 1 + change)
        factors[0] = 1
        outputs.append(output * factors)
        return outputs[0]

    called = [steps.module, *steps.module.children()]
    hooks = [module.register_forward_hook(alter) for module in called]
    with unchanged(steps.module), torch.enable_grad():
        loss = steps.run(batch)
    for hook in hooks:
        hook.remove()
    return torch.autograd.grad(loss, outputs[0])[0][0].detach() if outputs else None


def _of_random(steps: Any) -> dict[str, Any]:
    """Compare losses that are averaged over draws; a difference must be far above their noise."""
    n = len(steps.indices)
    halves = steps.indices[: n // 2], steps.indices[n // 2 :]
    far = torch.tensor(
        [
            steps.gradient(steps.indices, seed)[0]
            - sum(len(half) / n * steps.gradient(half, seed + 1000)[0] for half in halves)
            for seed in range(NUM_SEEDS)
        ]
    )
    scale = abs(steps.gradient(steps.indices)[0])
    noise = float(far.std()) / NUM_SEEDS**0.5
    mean = abs(float(far.mean()))
    is_other = mean > 6 * noise and mean > 0.01 * scale
    return {"kind": "random", "coupled": is_other, "by": mean / (scale or 1.0)}


class _Listener:
    """Stands for a run of several processes: notes weights, or applies factors."""

    def __init__(self, factors: list[float] | None = None) -> None:
        self.weights: list[tuple[float, float | None]] = []
        self.factors = factors

    def count(self, loss: Tensor, weight: Tensor | float, at_least: float | None = None) -> Tensor:
        """What ``mean_over`` calls, and with ``at_least`` ``sum_over``."""
        number = float(torch.as_tensor(weight).detach())
        self.weights.append((number, at_least))
        if self.factors is None:
            return loss if at_least is None else loss / max(number, at_least)
        return loss * self.factors[len(self.weights) - 1]


def _declared(steps: Any, pair: tuple[list[Any], list[Any]]) -> Tensor | None:
    """The whole's gradient as ``mean_over`` makes it of two shares; ``None`` without a call."""
    told, n = [], sum(map(len, pair))
    for share in pair:
        listener = _Listener()
        with heard_by(listener):
            steps.gradient(share)
        told.append(listener.weights)
    if not told[0]:
        return None
    terms = [*zip(*told, strict=True)]
    sums = [max(sum(number for number, _ in term), term[0][1] or 0.0) or 1.0 for term in terms]
    total = torch.zeros(())
    for share, mine in zip(pair, told, strict=True):
        p = len(share) / n
        factors = [
            (number if least is None else 1.0) / whole / p
            for (number, least), whole in zip(mine, sums, strict=True)
        ]
        with heard_by(_Listener(factors)):
            total = total + p * steps.gradient(share)[1].nan_to_num(0.0)
    return total


def _far(whole: Tensor, made: Tensor) -> float:
    return float((whole - made).norm() / (whole.norm() or 1.0))


def _share_of_first(whole: Tensor, a: Tensor, b: Tensor) -> float:
    """The ``p`` for which ``p * a + (1 - p) * b`` is closest to the whole."""
    return float((whole - b) @ (a - b) / ((a - b) @ (a - b)).clamp(min=1e-300))
