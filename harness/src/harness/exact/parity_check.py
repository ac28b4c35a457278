"""Find out whether a module trains alike on one device and on several, by computing it.

In: the module of a run that is about to make a step, and its ranks. Out: sentences for its user.
Every rank computes the same few samples whole, as if it were the only one, and then its part of
them. Wholes that differ between ranks are state that each rank has for itself; equal wholes and
other parts are a loss that is no mean over samples. One device that accumulates computes the parts
one after the other; dp and ddp2 split the calls of the second pass. Next: ``parity_passes.py``
computes, ``parity_verdict.py`` compares.
"""

import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch

from harness.errors import UserError
from harness.exact.collectives import (
    FAILED,
    FailedError,
    Ranks,
    TooSmallError,
    UnequalError,
    UnequalShapesError,
)
from harness.exact.few_samples import Collated, FewSamples, read_once
from harness.exact.parity_passes import Passes, Result
from harness.exact.parity_verdict import (
    DEPENDS,
    EVALUATES,
    UNEQUAL,
    Findings,
    Pair,
    Verdict,
    changed,
    is_odd,
)
from harness.exact.sketches import difference
from harness.exact.snapshot import NotCheckedError, Snapshot
from harness.kinds import MACHINERY, package
from harness.shards import has_parts
from harness.upstream import callbacks_of
from harness.upstream.processes import has_communication_hook

log = logging.getLogger(__name__)
END = "the end of its step"
NUM_VALIDATED = 16  # samples
SAME = 1e-9  # the relative difference of what is computed twice
SHAPES = (
    "{} gathers tensors of its part of a batch, which must have one shape on all ranks, and not "
    "all batches of this run are even: it will end at the first other one, the last of an epoch.\n"
    "Give the DataLoader drop_last=True, and a batch size that {} ranks divide."
)
NOT_CHECKED = (
    "It was not checked whether {} trains alike on one device and on several: {}.\n"
    "`python scripts/prove.py` compares whole runs."
)


class ParityCheck:
    """Compare steps with a few samples; a module that is right has no findings.

    Args:
        trainer: trains; its module is left as it was.
        ranks: all of them call the methods at the same time.
    """

    def __init__(self, trainer: pl.Trainer, ranks: Ranks) -> None:
        self.trainer, self.module, self.ranks = trainer, trainer.lightning_module, ranks
        num_batches = int(trainer.accumulate_grad_batches)
        self.num_parts = ranks.size if ranks.size > 1 else num_batches
        self.samples: FewSamples | None = None
        self.num_checks, self.must_be_even = 0, False
        self.has_single = False  # a part has one sample

    def look(self, number: int, batch_idx: int) -> Findings:
        """Check before a step, with samples of the first batches' one with this number."""
        name, further = type(self.module).__name__, Findings()
        try:
            found = self._guarded(lambda: self._look(number, batch_idx))
            if self.must_be_even or not (self.has_single and "unchecked" in found):
                return found
        except TooSmallError:
            pass
        except UnequalShapesError:
            further = {"shapes": SHAPES.format(name, self.ranks.size)}
        self.must_be_even = True  # from here on: one sample may also be too few for a step
        try:
            return self._guarded(lambda: self._look(number, batch_idx)) | further
        except TooSmallError:
            reason = "parts of so few samples have no finite gradient"
            return {"unchecked": NOT_CHECKED.format(name, reason)}
        except UnequalShapesError:
            return {"different": UNEQUAL.format(name, "a collective of another shape")}

    def look_at_validation(self, loader: Any, dataloader_idx: int) -> Findings:
        """Check that the first samples of a validation have the same values on every rank."""
        with contextlib.suppress(UnequalShapesError):
            return self._guarded(lambda: self._look_at_validation(loader, dataloader_idx))
        return {}

    def _guarded(self, look: Callable[[], Findings]) -> Findings:
        """Turn what fails, in whichever rank, into a finding in all of them."""
        name, reason = type(self.module).__name__, ""
        self.ranks.ended = None
        try:
            return look()
        except UnequalShapesError:
            raise
        except UnequalError as error:
            return {"different": UNEQUAL.format(name, error)}
        except FailedError as error:
            reason = str(error)
        except Exception as error:
            if isinstance(error, UserError) and self.ranks.size == 1:
                raise  # it knows what to type
            log.debug("The parity check of %s", name, exc_info=True)
            kind = "" if isinstance(error, NotCheckedError) else f"{type(error).__name__}: "
            # What a rank's module refuses is refused by the run's own step, in a moment.
            reason = "" if isinstance(error, UserError) else (kind + str(error)).splitlines()[0]
            with contextlib.suppress(FailedError):
                self.ranks.agree(FAILED, reason)
        finally:
            if self.module.device.type == "cuda":
                torch.cuda.empty_cache()
        return {"unchecked": NOT_CHECKED.format(name, reason)} if reason else {}

    def _look(self, number: int, batch_idx: int) -> Findings:
        if any(map(has_parts, self.module.parameters())):
            raise NotCheckedError("each rank has a shard of its parameters")
        strategy: Any = self.trainer.strategy
        notes_use = getattr(strategy.model, "find_unused_parameters", False)
        if notes_use and not hasattr(strategy, "wrap_anew"):
            raise NotCheckedError("find_unused_parameters with a strategy of another class")
        if has_communication_hook(self.trainer):
            raise NotCheckedError("a communication hook averages its gradients")
        with Passes(self.trainer, self.ranks) as passes:
            if self.samples is None:
                loaders = self.trainer.train_dataloader
                self.samples = FewSamples(loaders, self.num_parts, passes.is_mixed)
            sizes = self.samples.sizes(self.must_be_even)
            whole, parts = self.samples.places(sizes, self.num_checks)
            self.has_single = 1 in sizes
            self.num_checks += 1
            weights = [size * len(sizes) / sum(sizes) for size in sizes]
            if self.ranks.size > 1:
                here = slice(self.ranks.rank, self.ranks.rank + 1)
                parts, weights = parts[here], weights[here]
            batch, *batches = self.samples.read(number, [whole, *parts])
            first = passes.train([batch], batch_idx, [1.0], as_one=True)
            with self._split_calls(len(parts[0])):
                second = passes.train(batches, batch_idx, weights, as_one=False)
            everyone = self.ranks.agree(END, Pair(first, second))
            if 0 in sizes and any(one.part.has_gathered for one in everyone):
                raise NotCheckedError(f"{sum(sizes)} samples are too few for ranks that gather")
            verdict = Verdict(self.trainer, sizes, everyone)
            if verdict.is_too_small or (verdict.has_nan_logged and not self.must_be_even):
                raise TooSmallError
            if verdict.has_drawn:
                again, other = self.samples.read(number, [whole, whole])
                verdict.has_drawn = self._draws_matter(passes, first, batch_idx, again, other)
            if not verdict.is_suspect():
                return verdict.findings()
            again, reverse = self.samples.read(number, [whole, whole[::-1]])
            return verdict.findings(*self._noise(passes, first, batch_idx, again, reverse))

    def _split_calls(self, num_samples: int) -> Any:
        split: Any = getattr(self.trainer.strategy, "splitting_calls", None)
        return contextlib.nullcontext() if split is None else split(num_samples)

    def _draws_matter(
        self, passes: Passes, first: Result, batch_idx: int, *samples: Collated
    ) -> bool:
        """Return whether a step with other random numbers comes to something else, on any rank."""
        matters = False
        for i, one in enumerate(samples, 1):
            other = passes.train([one], batch_idx, [1.0], as_one=True, seed=2 * self.num_checks + i)
            matters |= difference(first.steps[0], other.steps[0])[0] > SAME
            values = first.logged[0].items()
            matters |= any(is_odd(v, other.logged[0].get(n), SAME, 0.0) for n, v in values)
        return any(self.ranks.agree("its other draws", matters))

    def _noise(
        self, passes: Passes, first: Result, batch_idx: int, again: Collated, reverse: Collated
    ) -> tuple[float, set[Any]]:
        """Measure rounding with the same samples again and in another order; find what is unstable.

        Returns:
            The difference of gradients; and what changes by itself, as a clock does.
        """
        same = passes.train([again], batch_idx, [1.0], as_one=True)
        other = passes.train([reverse], batch_idx, [1.0], as_one=True)
        noise = max(difference(first.steps[0], one.steps[0])[0] for one in (same, other))
        logged = first.logged[0].items()
        unstable = {n for n, v in logged if is_odd(v, same.logged[0].get(n), SAME, 0.0)}
        unstable |= {*changed(first.numbers, same.numbers)}
        found = self.ranks.agree("its second look", (noise, unstable))
        return max(one for one, _ in found), {name for _, names in found for name in names}

    def _look_at_validation(self, loader: Any, dataloader_idx: int) -> Findings:
        sampler = getattr(loader, "batch_sampler", None)
        turns = getattr(sampler, "turns", None) or [[]]
        of_ranks = self.ranks.agree("its first samples", turns[0][:NUM_VALIDATED])
        indices, before = of_ranks[0], of_ranks[-1]
        if not (indices and before):
            return {}
        with Passes(self.trainer, self.ranks) as passes:
            users = self._probing()
            first, again, later = (
                passes.validate(read_once(loader, batches), users, dataloader_idx).logged[-1]
                for batches in ([indices], [indices], [before, indices])
            )
        stable = {n: v for n, v in first.items() if not is_odd(v, again.get(n), SAME, 0.0)}
        everyone = self.ranks.agree(END, (stable, {n: later.get(n, first[n]) for n in stable}))
        eps = max((torch.finfo(p.dtype).eps for p in self.module.parameters()), default=1e-7)
        for sentence, column in ((EVALUATES, 0), (DEPENDS, 1)):
            for name, value in everyone[0][0].items():
                others = [one[column].get(name, value) for one in everyone]
                if any(is_odd(value, other, max(1e-4, math.sqrt(eps)), eps) for other in others):
                    values = ", ".join(f"{one[0]:.4g}" for one in others)
                    kind = type(self.module).__name__
                    return {"state": sentence.format(kind, name, values, f"{value[0]:.4g}")}
        return {}

    def _probing(self) -> list[pl.Callback]:
        """Return the user's callbacks that compute in an evaluation with state of each rank's own.

        Others are not called: what they write would be written twice.
        """
        hook = "on_validation_batch_end"
        users = [
            callback
            for callback in callbacks_of(self.trainer)
            if package(type(callback)) not in MACHINERY
            and getattr(type(callback), hook) is not getattr(pl.Callback, hook)
        ]
        mine = [Snapshot(callback).fingerprint() for callback in users]
        everyone = self.ranks.agree("its callbacks", mine)
        return [c for i, c in enumerate(users) if any(one[i] != mine[i] for one in everyone)]
