"""Find out whether a module is the same experiment on several devices, by computing it.

Before the first training step a few samples are collated whole, and once more in two uneven parts;
three steps are computed with both, on copies, and the gradients and logged values are compared:
those of the parts combined as this run combines its processes'. What a step keeps for the next one
shows in the second and third. Rounding is measured, with the same samples in another order. For dp
and ddp2, whose steps see whole batches and split calls, a copy with split calls is compared with a
plain one: their strategy has a method ``split_calls(copy, num_samples)``; ddp2 has parts for its
nodes as well. Evaluations are not compared: a process has whole batches there, as one would.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch

from harness.data.randomness import generator_states, restore_generators
from harness.errors import UserError
from harness.exact.first_samples import FirstSamples, UncheckedError
from harness.exact.gradients import difference, odd_log, tolerance
from harness.exact.in_child import in_child
from harness.exact.means import ADVICE
from harness.exact.seeded_steps import dropouts
from harness.exact.simulated import Copies, UnequalError, UnequalShapesError
from harness.exact.stand_ins import Remembered, nothing
from harness.shards import has_parts

log = logging.getLogger(__name__)
Prepare = Callable[[pl.LightningModule, int], object]
REMEDIES = {
    "state": "What a step keeps for the next ones (a bank, a running mean) is of each process's "
    f"samples: keep what all have, {ADVICE['a comparison of samples']}, or use strategy=dp or "
    "ddp2.",
    "split": "A call that is split must treat each sample by itself: name another one in "
    "trainer.strategy.modules, what is no batch in trainer.strategy.whole_inputs, or use "
    "strategy=ddp.",
    "loss": "What its loss may have, and what is written for it: "
    + "; ".join(f"{kind}: {written}" for kind, written in ADVICE.items())
    + ". What looks at a whole batch is right under strategy=dp and ddp2. See 'Any loss' in "
    "harness/docs/strategies.md.",
}
RANDOM = (
    "{} draws random numbers in its steps ({}): each process or device draws its own, so the "
    "weights are not those of one process. {}"
)
# Dropout is switched off while steps are compared; other draws cannot be.
NOT_COMPARED = "Its loss was not compared, as draws differ: is it a mean over samples?"
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


@dataclass(frozen=True)
class Finding:
    """What a user is told of a module.

    Args:
        kind: ``different``, ``random``, ``logged`` or ``unchecked``.
        sentence: for the user.
        size: of the difference, relative to the largest gradient of a step.
        name: of the parameter or the logged value.
    """

    kind: str
    sentence: str
    size: float = 0.0
    name: str = ""


def check_first_batch(
    module: pl.LightningModule, loaders: Any, num_parts: int = 2, prepare: Prepare = nothing
) -> list[Finding]:
    """Compare steps with a few samples whole, and in parts, of which nothing is left here.

    On a CPU it is done in a child of this process. A child has no GPU: there what copies share
    with the module is put back afterwards, as ``Remembered`` says.

    Args:
        module: belongs to a trainer that is about to train; it is left as it was.
        loaders: the trainer's, of which batches have been drawn.
        num_parts: 2 for what splits batches, 1 for what splits calls alone.
        prepare: is given each copy that computes a part, and how many samples that has, such as
            to split its calls.

    Returns:
        What is to be told; nothing of a module that is right.

    Raises:
        UserError: by the module's step, as in the run.
    """
    compare = partial(compare_first_batch, module, loaders, num_parts, prepare)
    if module.device.type != "cpu":
        return compare()
    try:
        return in_child(compare)  # type: ignore[no-any-return]
    except UserError:
        raise
    except Exception as error:
        return [Finding("unchecked", UNCHECKED.format(type(module).__name__, error))]


def compare_first_batch(
    module: pl.LightningModule, loaders: Any, num_parts: int, prepare: Prepare
) -> list[Finding]:
    """See ``check_first_batch``; in this process."""
    name, found = type(module).__name__, list[Finding]()
    before, states = Remembered(module), generator_states()
    on_gpu = torch.cuda.get_rng_state(module.device) if module.device.type == "cuda" else None
    dropped = next(dropouts(module, switch_off=False), None)
    if dropped and (num_parts > 1 or on_gpu is not None):  # a CPU's split calls draw one by one
        found.append(Finding("random", RANDOM.format(name, dropped, "").rstrip()))
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself will warn
            if any(map(has_parts, module.parameters())):
                raise UncheckedError("each process has a part of its parameters")
            samples = FirstSamples(loaders)
            for is_exact in (True, False):
                copies = partial(Copies, module, is_exact=is_exact)
                try:
                    more = _compare(module, copies, samples, prepare, num_parts)
                    break
                except Exception:  # a step that needs mixed precision
                    if not is_exact:
                        raise
                    before.put_back()
            found = more if any(one.kind == "random" for one in more) else found + more
    except UserError:
        raise
    except Exception as error:  # of the author's step, outside of a run
        log.debug("The first-batch check of %s", name, exc_info=True)
        why = "" if isinstance(error, UncheckedError) else f"{type(error).__name__}: "
        found.append(
            Finding("unchecked", UNCHECKED.format(name, (why + str(error)).splitlines()[0]))
        )
    finally:
        before.put_back()
        restore_generators(states)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, module.device)
    return found


def _compare(
    module: pl.LightningModule,
    copies: Callable[..., Copies],
    samples: FirstSamples,
    prepare: Prepare,
    num_parts: int,
) -> list[Finding]:
    """Compare in parts of unequal sizes, or of equal ones if the step gathers tensors of one."""
    part = max(1, samples.size // (2 if samples.are_even else 3))
    first = part if samples.are_even else samples.size - part
    sizes = [first, part] if num_parts > 1 else [samples.size]
    try:
        return _compare_in(sizes, module, copies, samples, prepare)
    except UnequalShapesError:
        return _compare_in([samples.size // 2] * num_parts, module, copies, samples, prepare)


def _compare_in(
    sizes: list[int],
    module: pl.LightningModule,
    copies: Callable[..., Copies],
    samples: FirstSamples,
    prepare: Prepare,
) -> list[Finding]:
    name, size = type(module).__name__, sum(sizes)
    copies = partial(copies, fixes_draws=len(sizes) > 1)
    reordered = copies([size]).run(samples.batches(0, [size], in_reverse=True), 0)
    whole, parts = copies([size]), copies(sizes, prepare)
    limit, worst, odd, remedy = 0.0, (0.0, ""), "", "loss" if len(sizes) > 1 else "split"
    is_split, where = len(sizes) > 1, "not by nn.Dropout"
    random = Finding("random", RANDOM.format(name, where, "").rstrip())
    uncompared = [Finding("random", RANDOM.format(name, where, NOT_COMPARED))]
    for step in range(samples.num_steps):
        expected = whole.run(samples.batches(step, [size]), step)
        has_drawn = whole.has_drawn or samples.has_drawn
        if is_split and (whole.has_unfixed or samples.has_unfixed):
            return uncompared
        values = [gradient for gradients in expected for gradient in gradients.values()]
        if not all(bool(gradient.isfinite().all()) for gradient in values):
            raise UncheckedError("its gradients are not finite")
        if values and not limit:
            limit = tolerance(values, whole.precision, difference(expected, reordered)[0])
        try:
            combined = parts.run(samples.batches(step, sizes), step)
        except UnequalError as error:
            return [Finding("different", UNEQUAL.format(name, error), float("inf"))]
        odd = odd or odd_log(whole.logged[0], parts.logged, sizes, max(limit, 1e-4))
        found = difference(expected, combined)
        if found[0] <= limit:
            continue
        if has_drawn and not is_split:
            return [random]
        if step and is_split and not worst[1]:  # the first step was right: without a past, too?
            one = copies([size]).run(samples.batches(step, [size]), step)
            other = copies(sizes, prepare).run(samples.batches(step, sizes), step)
            remedy = "state" if difference(one, other)[0] <= limit else remedy
        worst = worst if found[0] <= worst[0] else found
        if remedy == "state":
            break
    drawn = [random] if has_drawn and is_split else []
    if worst[1]:
        return [Finding("different", _sentence(module, sizes, worst, remedy), *worst), *drawn]
    if not limit:
        raise UncheckedError("no optimizer has made a step")
    logged = [Finding("logged", LOGGED.format(name, odd), name=odd)] if odd else []
    return logged + drawn


def _sentence(
    module: pl.LightningModule, sizes: list[int], worst: tuple[float, str], remedy: str
) -> str:
    trainer = module.trainer
    how = f"on {trainer.world_size} processes than on one"
    if trainer.world_size == 1:
        num = trainer.accumulate_grad_batches
        how = f"with trainer.accumulate_grad_batches={num} than without"
        how = how if num > 1 else "on several processes than on one"  # scripts/prove.py asks
    if len(sizes) == 1:
        how = f"where {type(trainer.strategy).__name__} splits its calls than where nothing does"
    size = f"{worst[0]:.1%}" if worst[0] < 10 else "much more"
    return (
        f"{type(module).__name__} is another experiment {how}: between {sum(sizes)} samples and "
        f"the same in shares of {' and '.join(map(str, sizes))} the gradient of {worst[1]} differs "
        f"by {size} of the largest.\n{REMEDIES[remedy]}"
    )
