"""Compare the results of a parity check, and name the cause of a difference and its solution.

In: the gradients and logged values of each rank, for a few samples as a whole and in parts. Out: a
message for each kind of difference. Every rank gets the same messages.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor

from harness.compat.logged_values import merge, reduced
from harness.compat.watched_operations import has_gradient_hooks
from harness.parity.gradient_sketches import (
    MEAN,
    OTHER,
    SUM,
    difference,
    is_finite,
    kind_of,
    mean_of,
    tolerance,
)
from harness.parity.parity_passes import Logged, Result
from harness.parity.seeded_steps import DROPOUTS

MORE = "See 'Any loss' in harness/docs/strategies.md."
# Code to write in the step, by kind of loss. tests/parity/test_advice.py trains with each.
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
    "state": "The module keeps state that each rank has built from its own samples, such as a "
    f"bank, a running mean or a table. Gather the values before you store them: {GATHERED}",
    "backward": "backward or on_before_backward changes the gradient on each rank separately. Add "
    "the change to the loss that training_step returns, or make the change in "
    "on_before_optimizer_step.",
    "hook": "A hook of a parameter changes the gradient on each rank before the average. Change "
    "the gradient in on_before_optimizer_step.",
    "split": "A split call must compute each sample independently. Name another module in "
    "trainer.strategy.modules, name arguments that are not batches in "
    "trainer.strategy.whole_inputs, or use strategy=ddp.",
}
TRAINS = "{} does not train alike {}: the gradient of {} differs by {}, {}.\n{}\n" + MORE
COUNTS = (
    "{} does not train alike with the split calls of {} and without: each call changes {}, "
    "and a step makes several calls.\nChange this value once per step, in training_step."
)
RANDOM = (
    "{} draws random numbers in its steps ({}): each {} draws different numbers, so the "
    "weights differ from those of a single process.\nThe training is as good. To compare "
    "strategies, switch off what draws, such as dropout."
)
NOT_COMPARED = " Its loss was not compared. Check that it is a mean over samples."
UNEQUAL = (
    "A step of {} is not the same for every part of a batch: {}. The run would hang, or combine "
    "unrelated values.\nReturn a loss in every step, and call optimizers and collectives equally "
    "often on all ranks."
)
LOGGED = (
    "{} logs {} in training. Its mean over the parts of a batch is not its value for the whole "
    "batch, so the log differs {}.\nLog a mean with its batch_size, or a torchmetrics metric."
)
EVALUATES = (
    "{} evaluates with state that each rank has built from its own samples: the values of {} for "
    f"the same samples are {{}}.\nGather the values before you store them: {GATHERED}"
)
DEPENDS = (
    "{} evaluates a batch with state from earlier batches, which differ by rank: {} of the same "
    "samples is {} after other batches, and {} before.\nLet validation_step depend on its batch "
    "alone."
)
Findings = dict[str, str]  # messages by "different", "random", "logged", "state", "unchecked"


@dataclass
class RankResult:
    """The results of a rank: of all samples as a whole, and of its own parts."""

    whole: Result
    part: Result


class Verdict:
    """Compare the results of all ranks; ``findings`` returns the messages.

    Args:
        trainer: of the run whose module was checked.
        sizes: the number of samples of each part.
        by_rank: the results of each rank.
    """

    def __init__(
        self, trainer: pl.Trainer, sizes: Sequence[int], by_rank: Sequence[RankResult]
    ) -> None:
        self.trainer, self.module, self.sizes = trainer, trainer.lightning_module, sizes
        self.name, self.num_ranks = type(self.module).__name__, len(by_rank)
        self.is_split = len(sizes) > 1  # whether the batch is split; else the strategy splits calls
        self.results = [result for rank in by_rank for result in (rank.whole, rank.part)]
        self.wholes = [rank.whole for rank in by_rank]
        self.expected = self.wholes[0].steps[0]
        parts = [rank.part for rank in by_rank]
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
        self.error_of_parts = difference(self.expected, self.combined, of_parts)
        self.error_between_ranks = max(
            difference(self.expected, whole.steps[0]) for whole in self.wholes
        )
        self.changed = [] if self.is_split else changed(parts[0].numbers, self.wholes[0].numbers)

    def is_suspect(self) -> bool:
        """Return whether the results differ by more than rounding usually explains."""
        if self.is_unequal or not self.is_usable:
            return False
        limit = tolerance(self.eps)
        is_far = self.error_of_parts[0] > limit and not (self.has_drawn and self.is_split)
        is_far |= self.error_between_ranks[0] > limit
        return is_far or bool(self.changed or self._wrong_log(()))

    def findings(self, noise: float = 0.0, unstable: Collection[Any] = ()) -> Findings:
        """Return a message for each kind of difference that exceeds rounding errors.

        Args:
            noise: the difference that rounding alone makes between such gradients.
            unstable: names of logged values, and keys of numbers, that change without a cause.
        """
        if self.is_unequal:
            return {"different": UNEQUAL.format(self.name, "some call an optimizer more often")}
        if not self.is_usable:
            return {}  # the next check tries again
        found, limit = Findings(), tolerance(self.eps, noise)
        has_own_seed = self.is_split or self.module.device.type != "cpu"
        if has_own_seed and any(result.has_dropout for result in self.results):
            found["random"] = self._random_message(self._dropout())
        changed_keys = [key for key in self.changed if key not in unstable]
        if self.error_between_ranks[0] > limit:
            found["different"] = self._gradient_message(self.error_between_ranks, "state")
        elif self.has_drawn and (self.is_split or self.error_of_parts[0] > limit):
            found["random"] = self._random_message("not by nn.Dropout")
            found["random"] += NOT_COMPARED if self.is_split else ""
        elif self.error_of_parts[0] > limit:
            found["different"] = self._gradient_message(self.error_of_parts, self._kind(limit))
        elif changed_keys:
            found["different"] = COUNTS.format(self.name, self._strategy(), changed_keys[0][-1])
        elif name := self._wrong_log(unstable):
            how = "on several ranks" if self.num_ranks > 1 else "with accumulated batches"
            how = how if self.is_split else "with split calls"
            found["logged"] = LOGGED.format(self.name, name, how)
        return found

    def _wrong_log(self, unstable: Collection[Any]) -> str:
        """Return the first name whose logged value differs between whole and parts, or ""."""
        limit = max(1e-4, tolerance(self.eps))
        for name, value in self.wholes[0].logged[0].items():
            if name in unstable:
                continue
            others = [whole.logged[0].get(name) for whole in self.wholes]
            others += [] if self.has_drawn else [combined(name, value, self.logged, self.sizes)]
            if any(differs(value, other, limit, self.eps) for other in others):
                return name
        return ""

    def _kind(self, limit: float) -> str:
        """Return the key in ``CURES`` for the first optimizer step whose gradients differ."""
        if not self.is_split:
            return "split"
        if any(is_overridden(h, self.module) for h in ("backward", "on_before_backward")):
            return "backward"
        if has_gradient_hooks(self.module):
            return "hook"
        kind, steps = OTHER, zip(self.expected, self.combined, strict=True)
        step = next(i for i, (e, c) in enumerate(steps) if difference([e], [c])[0] > limit)
        has_gathered = any(result.has_gathered for result in self.results)
        # Manual optimisation averages the parts' gradients, which hides their kind.
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

    def _gradient_message(self, error: tuple[float, str], kind: str) -> str:
        size = f"{error[0]:.1%} of the largest" if error[0] < 10 else "over 10 times the largest"
        if kind == "split":
            where = f"with the split calls of {self._strategy()} and without"
        elif self.num_ranks > 1:
            where = f"on {self.num_ranks} ranks and on one"
        else:
            where = f"with trainer.accumulate_grad_batches={len(self.sizes)} and without"
        samples = f"{sum(self.sizes)} samples"
        between = f"between {samples} at once and the same in parts of "
        between += " and ".join(str(size) for size in self.sizes if size)
        kinds = {"split": f"for {samples}", "state": f"between ranks for the same {samples}"}
        return TRAINS.format(
            self.name, where, error[1], size, kinds.get(kind, between), CURES[kind]
        )

    def _random_message(self, how: str) -> str:
        is_alone = self.is_split and self.num_ranks == 1
        return RANDOM.format(self.name, how, "accumulated batch" if is_alone else "rank or device")

    def _strategy(self) -> str:
        return type(self.trainer.strategy).__name__.removesuffix("Strategy")

    def _dropout(self) -> str:
        for name, layer in self.module.named_modules():
            if isinstance(layer, DROPOUTS) and layer.training and layer.p:
                return f"{name or type(layer).__name__}.p={layer.p:g}"
        return "dropout"


def combined(
    name: str, value: tuple[Any, ...], logged: Sequence[Logged], sizes: Sequence[int]
) -> tuple[Any, ...] | None:
    """Combine the parts' logged values of a name, as a run does; None if a part has none.

    ``value`` is that of the whole batch: number, reduction and batch_size.
    """
    if not all(name in part for part in logged):
        return None
    _, how, batch_size = value
    parts = [part[name] for part in logged]
    weights = [
        float(s) if batch_size is None else s * 0 + (p[2] or 0.0)
        for p, s in zip(parts, sizes, strict=True)
    ]
    weights = [w if size else 0.0 for w, size in zip(weights, sizes, strict=True)]
    totals = [
        p[0] * w if how == "mean" and w else p[0] for p, w in zip(parts, weights, strict=True)
    ]
    return reduced(how, *merge(how, [*zip(totals, weights, strict=True)])), how, batch_size


def differs(
    value: tuple[Any, ...], other: tuple[Any, ...] | None, limit: float, eps: float
) -> bool:
    """Return whether two logged values differ by more than rounding errors.

    Args:
        value: number, reduction and batch_size.
        other: the same, or None if it was not logged.
        limit: the largest relative difference.
        eps: of the dtype; 100 times as much is the largest absolute difference.
    """
    if other is None:
        return True
    if math.isnan(value[0]):
        return False
    most = max(abs(value[0]), abs(other[0]))
    return not abs(value[0] - other[0]) <= max(limit * most, 100 * eps)


def changed(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> list[Any]:
    """Return the keys that both dicts have with equal shapes, and whose numbers differ."""
    common = [key for key in one if key in other and one[key].shape == other[key].shape]
    return [
        key
        for key in common
        if not torch.allclose(one[key], other[key], rtol=1e-4, atol=1e-6, equal_nan=True)
    ]
