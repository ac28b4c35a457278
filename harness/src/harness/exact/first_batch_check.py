"""Find out whether a module is the same experiment on several devices, by computing it.

In: the module of a run that is about to train, and its loaders. Out: sentences for its user. A few
samples of the first batches are collated whole, and again in two uneven parts. Copies of the module
(`copies.py`) compute three steps with both, and the gradients and logged values are compared, those
of the parts combined as this run combines its processes'. State that a step keeps for the next one
shows in the second and third. Rounding is measured with the same samples in another order. For dp
and ddp2, whose steps see whole batches and split calls, a copy with split calls is compared with a
plain one. A step that draws random numbers draws others in parts, and is told and not compared.
Evaluations are not compared: each process has whole batches there.
"""

import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from harness.data.loaders import SharedLoader, leaves
from harness.data.randomness import (
    generator_states,
    preserved_generators,
    same_states,
    seed_generators,
)
from harness.data.shared_batches import SharedBatchSampler
from harness.errors import UserError
from harness.exact.copies import Copies, Gradients, Prepare
from harness.exact.mean_over import ADVICE
from harness.exact.seeded_steps import dropouts
from harness.exact.stand_ins import UnequalError, UnequalShapesError
from harness.shards import has_parts
from harness.upstream.logged_values import merge, reduced

log = logging.getLogger(__name__)
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)  # no two parts hide the same fraction
SPLIT = (
    "A call that is split must treat each sample by itself: name another one in "
    "trainer.strategy.modules, what is no batch in trainer.strategy.whole_inputs, or use "
    "strategy=ddp."
)
SHARES = (
    "What its loss may have, and what is written for it: "
    + "; ".join(f"{kind}: {written}" for kind, written in ADVICE.items())
    + ". What steps keep for later ones, such as a bank or a running mean, is gathered like a "
    "comparison. What looks at a whole batch is right under strategy=dp and ddp2. See 'Any loss' "
    "in harness/docs/strategies.md."
)
RANDOM = (
    "{} draws random numbers in its steps ({}): each process or device draws its own, so the "
    "weights are not those of one process."
)
NOT_COMPARED = " Its loss was not compared, as draws differ: is it a mean over samples?"
UNEQUAL = (
    "A step of {} is not the same for every share of a batch: one comes to {} first, and processes "
    "would wait for each other for ever or combine what does not belong together.\nReturn a loss, "
    "and step and gather as often, in each."
)
LOGGED = (
    "{} logs {} in training, which is not the mean over samples of what the shares of a batch log: "
    "on several processes it is another number.\nLog a mean with its batch_size, or a metric of "
    "torchmetrics."
)
UNCHECKED = (
    "Whether {} is the same experiment on several devices cannot be checked before training ({}).\n"
    "`python scripts/prove.py` compares whole runs."
)

Findings = dict[str, str]  # sentences by "different", "random", "logged" or "unchecked"


class UncheckedError(Exception):
    """A module cannot be checked: its data are a stream, or batches have one sample."""


def check_first_batch(
    module: pl.LightningModule, loaders: Any, num_parts: int = 2, prepare: Prepare | None = None
) -> Findings:
    """Compare steps with a few samples whole and in parts; a module that is right has no findings.

    Args:
        module: belongs to a trainer that is about to train; it is left as it was.
        loaders: the trainer's, of which batches have been drawn.
        num_parts: 2 for what splits batches, 1 for what splits calls alone.
        prepare: splits the calls of a copy that computes a part of so many samples.
    """
    name, device, findings = type(module).__name__, module.device, Findings()
    dropped = next(dropouts(module, switch_off=False), None)
    if dropped and (num_parts > 1 or device.type != "cpu"):  # a CPU's split calls draw one by one
        findings["random"] = RANDOM.format(name, dropped)
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            preserved_generators(),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the run itself will warn
            if any(map(has_parts, module.parameters())):
                raise UncheckedError("each process has a part of its parameters")
            findings |= _compare(module, FirstSamples(loaders), num_parts, prepare)
    except UserError:
        raise
    except Exception as error:  # of the author's step, outside of a run
        log.debug("The first-batch check of %s", name, exc_info=True)
        why = "" if isinstance(error, UncheckedError) else f"{type(error).__name__}: "
        findings["unchecked"] = UNCHECKED.format(name, (why + str(error)).splitlines()[0])
    return findings


def _compare(
    module: pl.LightningModule, samples: "FirstSamples", num_parts: int, prepare: Prepare | None
) -> Findings:
    """Compare in parts of unequal sizes, or of equal ones if the step gathers tensors of one."""
    part = max(1, samples.size // (2 if samples.are_even else 3))
    first = part if samples.are_even else samples.size - part
    sizes = [first, part] if num_parts > 1 else [samples.size]
    try:
        return _compare_in(sizes, module, samples, prepare)
    except UnequalShapesError:
        return _compare_in([samples.size // 2] * num_parts, module, samples, prepare)


def _compare_in(
    sizes: list[int], module: pl.LightningModule, samples: "FirstSamples", prepare: Prepare | None
) -> Findings:
    name, size, is_split = type(module).__name__, sum(sizes), len(sizes) > 1
    in_reverse = Copies(module, [size]).run(samples.batches(0, [size], in_reverse=True), 0)
    reference, sharded = Copies(module, [size]), Copies(module, sizes, prepare)
    random, has_drawn = RANDOM.format(name, "not by nn.Dropout"), False
    limit, worst, where, odd = 0.0, 0.0, "", ""
    for step in range(samples.num_steps):
        expected = reference.run(samples.batches(step, [size]), step)
        gradients = [gradient for one in expected for gradient in one.values()]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise UncheckedError("its gradients are not finite")
        if gradients and not limit:
            limit = tolerance(gradients, difference(expected, in_reverse)[0])
        try:
            combined = sharded.run(samples.batches(step, sizes), step)
        except UnequalError as error:
            return {"different": UNEQUAL.format(name, error)}
        has_drawn = reference.has_drawn or samples.has_drawn
        if has_drawn and is_split:
            return {"random": random + NOT_COMPARED}
        odd = odd or odd_log(reference.logged[0], sharded.logged, sizes, max(limit, 1e-4))
        far, parameter = difference(expected, combined)
        if far > max(limit, worst):
            worst, where = far, parameter
    if not limit:
        raise UncheckedError("no optimizer has made a step")
    if where and has_drawn:
        return {"random": random}
    if where:
        return {"different": _sentence(module, sizes, worst, where)}
    return {"logged": LOGGED.format(name, odd)} if odd else {}


def _sentence(module: pl.LightningModule, sizes: list[int], worst: float, where: str) -> str:
    trainer, num_batches = module.trainer, int(module.trainer.accumulate_grad_batches)
    if len(sizes) == 1:
        how = f"where {type(trainer.strategy).__name__} splits its calls than where nothing does"
    elif trainer.world_size > 1:
        how = f"on {trainer.world_size} processes than on one"
    else:
        how = f"with trainer.accumulate_grad_batches={num_batches} than without"
    size = f"{worst:.1%}" if worst < 10 else "much more"
    return (
        f"{type(module).__name__} is another experiment {how}: between {sum(sizes)} samples "
        f"and the same in shares of {' and '.join(map(str, sizes))} the gradient of {where} "
        f"differs by {size} of the largest.\n{SHARES if len(sizes) > 1 else SPLIT}"
    )


def difference(expected: Sequence[Gradients], actual: Sequence[Gradients]) -> tuple[float, str]:
    """Return the largest difference, relative to the largest gradient of its step, and where."""
    if len(expected) != len(actual):
        return math.inf, "the number of steps of optimizers"
    worst, where = 0.0, ""
    for one, other in zip(expected, actual, strict=True):
        scale = max((float(g.abs().max()) for g in one.values() if g.numel()), default=0.0)
        for name in [name for name, gradient in one.items() if gradient.numel()]:
            apart = (one[name] - other[name]).abs().nan_to_num(nan=math.inf)
            far = float(apart.max()) / (scale or 1e-30)
            if far > worst:
                worst, where = far, name
    return worst, where


def tolerance(gradients: Sequence[Tensor], noise: float) -> float:
    """Return the difference that rounding may make, relative to the largest gradient.

    ``noise`` is the difference made by another order of the samples. If it is more than rounding
    explains, the step depends on the order, and ``noise`` is ignored.
    """
    eps = max(torch.finfo(gradient.dtype).eps for gradient in gradients)
    floor, most = math.sqrt(eps) / 10, min(0.1, 30 * math.sqrt(eps))
    return max(floor, 8 * noise) if noise <= most else floor


def odd_log(
    expected: dict[str, Any], shares: Sequence[dict[str, Any]], sizes: Sequence[int], limit: float
) -> str:
    """Return the first logged value that those of its shares do not combine to; empty if all do."""
    for name, (value, how, own) in expected.items():
        if not all(name in share for share in shares):
            return name
        values = [share[name][0] for share in shares]
        counts = sizes if own is None else [share[name][2] for share in shares]
        weights = [float(n) for n in counts]
        totals = [v * w if how == "mean" and w else v for v, w in zip(values, weights, strict=True)]
        together = reduced(how, *merge(how, [*zip(totals, weights, strict=True)]))
        most = max(abs(value), *map(abs, values))
        if not abs(together - value) <= limit * most and not math.isnan(value):
            return name
    return ""


class FirstSamples:
    """Read a few samples of the batches with which training begins; samplers are not moved by it.

    Args:
        loaders: of a trainer that trains.
    """

    def __init__(self, loaders: Any) -> None:
        self.structure = loaders.iterables if isinstance(loaders, CombinedLoader) else loaders
        self.drawn = {id(one): _largest_batches(one) for one in leaves(loaders)}
        fewest = min((len(b) for batches in self.drawn.values() for b in batches), default=0)
        self.size = max((n for n in PRIMES if n <= fewest), default=0)
        if not self.size:
            raise UncheckedError("batches have one sample")
        # With even shares only, an author's own all-reduce of means is right.
        self.are_even = all(_is_even(one.batch_sampler) for one in leaves(loaders))
        self.num_steps = max(3, *map(len, self.drawn.values()))
        self.has_drawn = False  # random numbers for a whole batch

    def batches(self, step: int, sizes: Sequence[int], in_reverse: bool = False) -> list[Any]:
        """Collate the samples of a step in parts of these sizes."""
        places, parts = [*range(sum(sizes))][:: -1 if in_reverse else 1], []
        for size in sizes:
            part, places = places[:size], places[size:]
            parts.append(apply_to_collection(self.structure, DataLoader, self._batch, step, part))
        return parts

    def _batch(self, loader: Any, step: int, places: Sequence[int]) -> Any:
        """Read samples as the run does, with generators that are seeded for each, and collate."""
        drawn, dataset, sampler = self.drawn[id(loader)], loader.dataset, loader.batch_sampler
        indices = drawn[step % len(drawn)]
        first = step // len(drawn) * 5  # a batch that comes again begins with another sample
        wanted = sampler.batch([indices[(first + place) % self.size] for place in places]).begin()
        reads_whole = hasattr(dataset, "__getitems__")
        samples = dataset.__getitems__(wanted) if reads_whole else [dataset[i] for i in wanted]
        seed_generators(step)
        before = generator_states()
        batch = loader.collate_fn(samples)
        self.has_drawn |= not same_states(before, generator_states())
        return batch


def _is_even(sampler: Any) -> bool:
    """Return whether processes always have shares of one size."""
    size, num_shares = getattr(sampler.batches, "batch_size", None), sampler.num_ranks
    num_shares = max(2, num_shares * sampler.num_micro_batches)
    return bool(size and size % num_shares == 0 and getattr(sampler.batches, "drop_last", False))


def _largest_batches(loader: Any) -> list[Any]:
    """Return the largest of a loader's first batches."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, SharedBatchSampler):
        raise UncheckedError("its batches come from a stream")
    own = type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]
    if any("__iter__" in vars(kind) for kind in own if kind is not SharedLoader):
        raise UncheckedError("its loader's __iter__ makes the batches")
    first = sampler.first
    while len(first) > 3 and sum(map(len, first[:-1])) > 61:  # enough samples for three steps
        first = first[:-1]
    most = max(map(len, first), default=0)
    return [batch for batch in first if len(batch) == most]
