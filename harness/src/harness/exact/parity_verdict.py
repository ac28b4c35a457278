"""Compare what the ranks of a parity check have computed, and say what differs and what to write.

In: each rank's gradients and logged values, of a few samples whole and of its part of them. Out:
sentences, by kind, the same in every rank.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor

from harness.exact.parity_passes import Logged, Result
from harness.exact.seeded_steps import DROPOUTS
from harness.exact.sketches import (
    MEAN,
    OTHER,
    SUM,
    difference,
    is_finite,
    kind_of,
    mean_of,
    tolerance,
)
from harness.upstream.logged_values import merge, reduced
from harness.upstream.watched_operations import has_gradient_hooks

MORE = "See 'Any loss' in harness/docs/strategies.md."
# What to write in the step, by kind of loss. tests/exact/test_advice.py trains each.
ADVICE = {
    SUM: "sum_over(loss)",
    MEAN: "mean_over(loss, number)",
    OTHER: "self.all_gather(z, sync_grads=True).flatten(0, -2)",
}
GATHERED = "z = self.all_gather(z).flatten(0, -2)"
CURES = {
    SUM: f"Its loss is a sum: return {ADVICE[SUM]}, from harness.",
    MEAN: "Its loss is a mean over tokens, nodes or weights, not over samples: return "
    f"{ADVICE[MEAN]}, from harness.",
    OTHER: "Its loss compares samples, or is a function of the whole batch: gather the outputs "
    f"(B, D) that it compares, z = {ADVICE[OTHER]}",
    "gathered": "Its loss compares samples, or divides by a number of all ranks: gather the "
    f"outputs (B, D) that it compares, z = {ADVICE[OTHER]}, or return {ADVICE[SUM]}, from harness.",
    "accumulated": "Its loss compares samples, or is a function of the whole batch: use "
    "trainer.accumulate_grad_batches=1, and a smaller batch.",
    "state": "It keeps what each rank has made of its own samples, such as a bank, a running mean "
    f"or a table: gather what you put into it, before you put it there, {GATHERED}",
    "backward": "backward or on_before_backward changes the gradient of each rank for itself: add "
    "it to the loss that training_step returns, or change it in on_before_optimizer_step.",
    "hook": "A hook of a parameter changes the gradient of each rank before they are averaged: "
    "change it in on_before_optimizer_step.",
    "split": "A call that is split must treat each sample by itself. Name another one in "
    "trainer.strategy.modules, name what is no batch in trainer.strategy.whole_inputs, or use "
    "strategy=ddp.",
}
TRAINS = "{} does not train alike {}: the gradient of {} differs by {}, {}.\n{}\n" + MORE
COUNTS = (
    "{} does not train alike where {} splits its calls and where nothing does: {} changes with "
    "each call, and a step makes several.\nChange it in training_step, once a step."
)
RANDOM = (
    "{} draws random numbers in its steps ({}): each {} draws its own, so the weights are not "
    "those of one process."
)
NOT_COMPARED = " Its loss was not compared: is it a mean over samples?"
UNEQUAL = (
    "A step of {} is not the same for every part of a batch: one comes to {} first, and ranks "
    "would wait for each other for ever or combine what does not belong together.\nReturn a loss, "
    "and step and gather as often, in every rank."
)
LOGGED = (
    "{} logs {} in training, which is not the mean over samples of what the parts of a batch log: "
    "{} it is another number.\nLog a mean with its batch_size, or a metric of torchmetrics."
)
EVALUATES = (
    "{} evaluates with what each rank has made of its own samples: {} of the same samples is {} on "
    f"the ranks.\nGather what you put into it, before you put it there: {GATHERED}"
)
DEPENDS = (
    "{} evaluates a batch by what it has kept of those before, and each rank has others before it: "
    "{} of the same samples is {} after other batches, and {} before.\nLet a validation_step "
    "depend on its batch alone."
)
Findings = dict[str, str]  # sentences by "different", "random", "logged", "state", "unchecked"


@dataclass
class Pair:
    """What a rank has computed: the samples whole, and its part or parts of them."""

    whole: Result
    part: Result


class Verdict:
    """What the passes of all ranks mean.

    Args:
        trainer: whose module was checked.
        sizes: the number of samples of each part.
        everyone: what each rank has computed.
    """

    def __init__(self, trainer: pl.Trainer, sizes: Sequence[int], everyone: Sequence[Pair]) -> None:
        self.trainer, self.module, self.sizes = trainer, trainer.lightning_module, sizes
        self.name, self.num_ranks = type(self.module).__name__, len(everyone)
        self.is_split = len(sizes) > 1  # in parts; else the calls are
        self.results = [result for one in everyone for result in (one.whole, one.part)]
        self.wholes = [one.whole for one in everyone]
        self.expected = self.wholes[0].steps[0]
        parts = [one.part for one in everyone]
        self.parts = [steps for part in parts for steps in part.steps]
        self.logged = [logged for part in parts for logged in part.logged]
        trained = [p.dtype for p in self.module.parameters() if p.requires_grad]
        self.eps = max((torch.finfo(dtype).eps for dtype in trained), default=1e-7)
        self.has_drawn = any(result.has_drawn for result in self.results)
        self.is_unequal = any(len(part) != len(self.expected) for part in self.parts)
        is_finite_whole = bool(self.expected) and is_finite(self.expected)
        self.is_usable = is_finite_whole and all(map(is_finite, self.parts))
        self.is_too_small = is_finite_whole and not (self.is_usable or self.is_unequal)
        values = [v for logged in self.logged for v, _, _ in logged.values()]
        whole = [v for v, _, _ in self.wholes[0].logged[0].values()]
        self.has_nan_logged = any(map(math.isnan, values)) and not any(map(math.isnan, whole))
        if self.is_unequal or not self.is_usable:
            return
        self.combined = [
            mean_of([part[i] for part in self.parts], parts[0].factor)
            for i in range(len(self.expected))
        ]
        of_parts = [sketches for part in self.parts for sketches in part]
        self.far = difference(self.expected, self.combined, of_parts)
        self.apart = max(difference(self.expected, one.steps[0]) for one in self.wholes)
        self.moved = [] if self.is_split else changed(parts[0].numbers, self.wholes[0].numbers)

    def is_suspect(self) -> bool:
        """Return whether something differs by more than the least that rounding may make."""
        if self.is_unequal or not self.is_usable:
            return False
        limit = tolerance(self.eps)
        of_parts = self.far[0] > limit and not (self.has_drawn and self.is_split)
        return of_parts or self.apart[0] > limit or bool(self.moved or self._odd_logs(()))

    def findings(self, noise: float = 0.0, unstable: Collection[Any] = ()) -> Findings:
        """Return what differs by more than rounding.

        Args:
            noise: the difference that rounding makes of these gradients.
            unstable: the names of logged values, and places of numbers, that change by themselves.
        """
        if self.is_unequal:
            return {"different": UNEQUAL.format(self.name, "a step of its optimizer")}
        if not self.is_usable:
            return {}  # the next check tries again
        found, limit = Findings(), tolerance(self.eps, noise)
        draws_own = self.is_split or self.module.device.type != "cpu"
        if draws_own and any(result.has_dropout for result in self.results):
            found["random"] = self._random(self._dropout())
        moved = [place for place in self.moved if place not in unstable]
        if self.apart[0] > limit:
            found["different"] = self._trains(self.apart, "state")
        elif self.has_drawn and (self.is_split or self.far[0] > limit):
            found["random"] = self._random("not by nn.Dropout")
            found["random"] += NOT_COMPARED if self.is_split else ""
        elif self.far[0] > limit:
            found["different"] = self._trains(self.far, self._kind(limit))
        elif moved:
            found["different"] = COUNTS.format(self.name, self._strategy(), moved[0][-1])
        elif odd := self._odd_logs(unstable):
            how = "on several ranks" if self.num_ranks > 1 else "with accumulated batches"
            found["logged"] = LOGGED.format(self.name, odd, how if self.is_split else "here")
        return found

    def _odd_logs(self, unstable: Collection[Any]) -> str:
        """Return the first logged value that the parts do not combine to; empty if all do."""
        limit = max(1e-4, tolerance(self.eps))
        for name, value in self.wholes[0].logged[0].items():
            if name in unstable:
                continue
            together = [w.logged[0].get(name) for w in self.wholes]
            together += [] if self.has_drawn else [combined(name, value, self.logged, self.sizes)]
            if any(is_odd(value, other, limit, self.eps) for other in together):
                return name
        return ""

    def _kind(self, limit: float) -> str:
        """Say what kind of loss it is, from the first step of an optimizer that differs."""
        if not self.is_split:
            return "split"
        if any(is_overridden(h, self.module) for h in ("backward", "on_before_backward")):
            return "backward"
        if has_gradient_hooks(self.module):
            return "hook"
        kind, steps = OTHER, zip(self.expected, self.combined, strict=True)
        step = next(i for i, (e, c) in enumerate(steps) if difference([e], [c])[0] > limit)
        has_gathered = any(result.has_gathered for result in self.results)
        # Gradients of parts that were averaged by hand do not tell.
        if self.module.automatic_optimization:
            weights = [size * len(self.sizes) / sum(self.sizes) for size in self.sizes]
            alone = [
                {name: gradient / weight for name, gradient in part[step].items()}
                for part, weight in zip(self.parts, weights, strict=True)
                if weight
            ]
            kind = kind_of(self.expected[step], alone, limit)
            if has_gathered:
                kind = "gathered" if kind == SUM else OTHER
        return "accumulated" if kind == OTHER and self.num_ranks == 1 else kind

    def _trains(self, far: tuple[float, str], kind: str) -> str:
        size = f"{far[0]:.1%} of the largest" if far[0] < 10 else "more than all others are"
        if kind == "split":
            where = f"where {self._strategy()} splits its calls and where nothing does"
        elif self.num_ranks > 1:
            where = f"on {self.num_ranks} ranks and on one"
        else:
            where = f"with trainer.accumulate_grad_batches={len(self.sizes)} and without"
        samples = f"{sum(self.sizes)} samples"
        between = f"between {samples} and the same in parts of "
        between += " and ".join(str(size) for size in self.sizes if size)
        kinds = {"split": f"for {samples}", "state": f"between ranks for the same {samples}"}
        return TRAINS.format(self.name, where, far[1], size, kinds.get(kind, between), CURES[kind])

    def _random(self, how: str) -> str:
        is_alone = self.is_split and self.num_ranks == 1
        return RANDOM.format(self.name, how, "accumulated batch" if is_alone else "rank or device")

    def _strategy(self) -> str:
        return type(self.trainer.strategy).__name__.removesuffix("Strategy")

    def _dropout(self) -> str:
        for name, part in self.module.named_modules():
            if isinstance(part, DROPOUTS) and part.training and part.p:
                return f"{name or type(part).__name__}.p={part.p:g}"
        return "dropout"


def combined(
    name: str, value: tuple[Any, ...], logged: Sequence[Logged], sizes: Sequence[int]
) -> tuple[Any, ...] | None:
    """Return what the parts have logged under a name as a run combines it; None if one has not."""
    if not all(name in part for part in logged):
        return None
    _, how, own = value
    parts = [part[name] for part in logged]
    weights = [
        float(s) if own is None else s * 0 + (p[2] or 0.0)
        for p, s in zip(parts, sizes, strict=True)
    ]
    weights = [w if size else 0.0 for w, size in zip(weights, sizes, strict=True)]
    totals = [
        p[0] * w if how == "mean" and w else p[0] for p, w in zip(parts, weights, strict=True)
    ]
    return reduced(how, *merge(how, [*zip(totals, weights, strict=True)])), how, own


def is_odd(value: tuple[Any, ...], other: tuple[Any, ...] | None, limit: float, eps: float) -> bool:
    """Return whether two logged values differ by more than rounding, also close to 0."""
    if other is None:
        return True
    if math.isnan(value[0]):
        return False
    most = max(abs(value[0]), abs(other[0]))
    return not abs(value[0] - other[0]) <= max(limit * most, 100 * eps)


def changed(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> list[Any]:
    """Return the places of numbers that differ."""
    common = [place for place in one if place in other and one[place].shape == other[place].shape]
    return [
        place
        for place in common
        if not torch.allclose(one[place], other[place], rtol=1e-4, atol=1e-6, equal_nan=True)
    ]
