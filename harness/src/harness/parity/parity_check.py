"""Check that a module trains alike on one device and on several, by computing a few samples.

In: the module of a run before a step, and the run's ranks. Out: warnings for the user. There are
two passes over the same few samples:

1. Whole: every rank computes all of them, as if it were the only rank.
2. Parts: every rank computes its part. One device that accumulates computes the parts in turn; dp
   and ddp2 split the calls of the module instead.

If the whole results differ by rank, the module's state differs by rank. If only the parts' results
differ from the whole, the loss is not a mean over samples. Next: ``parity_passes.py`` computes the
passes, and ``parity_verdict.py`` compares them.
"""

import contextlib
import logging
import math
import textwrap
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch

from harness.compat import callbacks_of
from harness.compat.processes import has_communication_hook
from harness.errors import UserError
from harness.kinds import FRAMEWORKS, package
from harness.parity.collectives import (
    FAILED,
    FailedError,
    Ranks,
    TooSmallError,
    UnequalError,
    UnequalShapesError,
)
from harness.parity.few_samples import Collated, FewSamples, read_once
from harness.parity.gradient_sketches import difference
from harness.parity.parity_passes import Passes, Result
from harness.parity.parity_verdict import (
    DEPENDS,
    EVALUATES,
    UNEQUAL,
    Findings,
    RankResult,
    Verdict,
    changed,
    differs,
)
from harness.parity.snapshot import NotCheckedError, Snapshot
from harness.sharded import is_sharded

log = logging.getLogger(__name__)
END = "the end of its step"
NUM_VALIDATED = 16  # samples
MAX_REASON = 300  # characters: torch's errors may have 2,000
SAME = 1e-9  # relative difference of equal computations
SHAPES = (
    "{} gathers tensors of its local batch, whose shapes must be equal on all ranks. In this "
    "run, the last local batches of an epoch have different shapes: the run will stop there.\n"
    "Give the DataLoader drop_last=True, and a batch size that is a multiple of {}."
)
NOT_CHECKED = (
    "The run did not check whether {} trains alike on one device and on several: {}.\n"
    "`python scripts/prove.py` compares whole runs."
)


class ParityCheck:
    """Compute a few samples whole and in parts, and return findings if the results differ.

    Args:
        trainer: the run's trainer. Its module is restored after each check.
        ranks: the run's ranks. All of them must call each method at the same time.
    """

    def __init__(self, trainer: pl.Trainer, ranks: Ranks) -> None:
        self.trainer, self.module, self.ranks = trainer, trainer.lightning_module, ranks
        num_batches = int(trainer.accumulate_grad_batches)
        self.num_parts = ranks.size if ranks.size > 1 else num_batches
        self.samples: FewSamples | None = None
        self.num_checks, self.must_be_even = 0, False
        self.has_single = False  # whether a part has one sample

    def check_step(self, number: int, batch_idx: int) -> Findings:
        """Check a training step; restore the module.

        Args:
            number: chooses one of the run's first batches.
            batch_idx: the argument for the training step.
        """
        name, other_findings = type(self.module).__name__, Findings()
        try:
            found = self._guarded(lambda: self._compare_step(number, batch_idx))
            if self.must_be_even or not (self.has_single and "unchecked" in found):
                return found
        except TooSmallError:
            pass
        except UnequalShapesError:
            other_findings = {"shapes": SHAPES.format(name, self.ranks.size)}
        self.must_be_even = True  # from now on, because a part of one sample may be too small
        try:
            return self._guarded(lambda: self._compare_step(number, batch_idx)) | other_findings
        except TooSmallError:
            reason = "parts of so few samples have no finite gradient"
            return {"unchecked": NOT_CHECKED.format(name, reason)}
        except UnequalShapesError:
            return {
                "different": UNEQUAL.format(name, "the ranks gather tensors of different shapes")
            }

    def check_validation(self, loader: Any, dataloader_idx: int) -> Findings:
        """Check that all ranks log the same values for the first samples of a validation."""
        with contextlib.suppress(UnequalShapesError):
            return self._guarded(lambda: self._compare_validation(loader, dataloader_idx))
        return {}

    def _guarded(self, check: Callable[[], Findings]) -> Findings:
        """Return the findings of a check; turn an error of any rank into a finding on all."""
        name, reason = type(self.module).__name__, ""
        self.ranks.ended = None
        try:
            return check()
        except UnequalShapesError:
            raise
        except UnequalError as error:
            return {"different": UNEQUAL.format(name, error)}
        except FailedError as error:
            reason = str(error)
        except Exception as error:
            if isinstance(error, UserError) and self.ranks.size == 1:
                raise  # its message has the solution
            log.debug("The parity check of %s", name, exc_info=True)
            kind = "" if isinstance(error, NotCheckedError) else f"{type(error).__name__}: "
            # The training step that follows raises a ``UserError`` again.
            text = (kind + str(error)).splitlines()[0]
            reason = "" if isinstance(error, UserError) else textwrap.shorten(text, MAX_REASON)
            with contextlib.suppress(FailedError):
                self.ranks.agree(FAILED, reason)
        finally:
            if self.module.device.type == "cuda":
                torch.cuda.empty_cache()
        return {"unchecked": NOT_CHECKED.format(name, reason)} if reason else {}

    def _compare_step(self, number: int, batch_idx: int) -> Findings:
        if any(map(is_sharded, self.module.parameters())):
            raise NotCheckedError("each rank has a shard of its parameters")
        strategy: Any = self.trainer.strategy
        notes_use = getattr(strategy.model, "find_unused_parameters", False)
        if notes_use and not hasattr(strategy, "rewrap"):
            raise NotCheckedError(
                "find_unused_parameters=True is checked only with Lightning's own DDPStrategy"
            )
        if has_communication_hook(self.trainer):
            raise NotCheckedError("a communication hook averages its gradients")
        with Passes(self.trainer, self.ranks) as passes:
            if self.samples is None:
                loaders = self.trainer.train_dataloader
                self.samples = FewSamples(loaders, self.num_parts, passes.is_mixed)
            sizes = self.samples.sizes(self.must_be_even)
            whole, parts = self.samples.positions(sizes, self.num_checks)
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
            by_rank = self.ranks.agree(END, RankResult(first, second))
            if 0 in sizes and any(result.part.has_gathered for result in by_rank):
                raise NotCheckedError(
                    f"{sum(sizes)} samples are too few for a step that calls a collective on "
                    f"{len(sizes)} ranks"
                )
            verdict = Verdict(self.trainer, sizes, by_rank)
            if verdict.is_too_small or (verdict.has_nan_logged and not self.must_be_even):
                raise TooSmallError
            if verdict.has_drawn:
                copies = self.samples.read(number, [whole, whole])
                verdict.has_drawn = self._draws_matter(passes, first, batch_idx, *copies)
            if not verdict.is_suspect():
                return verdict.findings()
            same, backwards = self.samples.read(number, [whole, whole[::-1]])
            return verdict.findings(*self._noise(passes, first, batch_idx, same, backwards))

    def _split_calls(self, num_samples: int) -> Any:
        split: Any = getattr(self.trainer.strategy, "splitting_calls", None)
        return contextlib.nullcontext() if split is None else split(num_samples)

    def _draws_matter(
        self, passes: Passes, first: Result, batch_idx: int, *samples: Collated
    ) -> bool:
        """Return whether another seed changes the gradients or logged values, on any rank."""
        matters = False
        for i, batch in enumerate(samples, 1):
            other = passes.train(
                [batch], batch_idx, [1.0], as_one=True, seed=2 * self.num_checks + i
            )
            matters |= difference(first.steps[0], other.steps[0])[0] > SAME
            values = first.logged[0].items()
            matters |= any(differs(v, other.logged[0].get(n), SAME, 0.0) for n, v in values)
        return any(self.ranks.agree("a step with another seed", matters))

    def _noise(
        self, passes: Passes, first: Result, batch_idx: int, same: Collated, backwards: Collated
    ) -> tuple[float, set[Any]]:
        """Measure rounding errors, and find values that change without a cause, such as a clock.

        Args:
            passes: computes the steps.
            first: the result to compare with.
            batch_idx: the argument for the training step.
            same: the samples of ``first``.
            backwards: the same samples in reverse order.

        Returns:
            The largest difference of the gradients, and the names of the unstable values.
        """
        again = passes.train([same], batch_idx, [1.0], as_one=True)
        other = passes.train([backwards], batch_idx, [1.0], as_one=True)
        noise = max(difference(first.steps[0], result.steps[0])[0] for result in (again, other))
        logged = first.logged[0].items()
        unstable = {n for n, v in logged if differs(v, again.logged[0].get(n), SAME, 0.0)}
        unstable |= {*changed(first.numbers, again.numbers)}
        by_rank = self.ranks.agree("a repeated step", (noise, unstable))
        return max(noise for noise, _ in by_rank), {n for _, names in by_rank for n in names}

    def _compare_validation(self, loader: Any, dataloader_idx: int) -> Findings:
        sampler = getattr(loader, "batch_sampler", None)
        batches = getattr(sampler, "evaluation_batches", None) or [[]]
        by_rank = self.ranks.agree("its first samples", batches[0][:NUM_VALIDATED])
        indices, other_indices = by_rank[0], by_rank[-1]
        if not (indices and other_indices):
            return {}
        with Passes(self.trainer, self.ranks) as passes:
            callbacks = self._stateful_callbacks()
            first, again, later = (
                passes.validate(read_once(loader, batches), callbacks, dataloader_idx).logged[-1]
                for batches in ([indices], [indices], [other_indices, indices])
            )
        stable = {n: v for n, v in first.items() if not differs(v, again.get(n), SAME, 0.0)}
        by_rank = self.ranks.agree(END, (stable, {n: later.get(n, first[n]) for n in stable}))
        eps = max((torch.finfo(p.dtype).eps for p in self.module.parameters()), default=1e-7)
        for message, column in ((EVALUATES, 0), (DEPENDS, 1)):
            for name, value in by_rank[0][0].items():
                others = [of_rank[column].get(name, value) for of_rank in by_rank]
                if any(differs(value, other, max(1e-4, math.sqrt(eps)), eps) for other in others):
                    values = ", ".join(f"{other[0]:.4g}" for other in others)
                    kind = type(self.module).__name__
                    return {"state": message.format(kind, name, values, f"{value[0]:.4g}")}
        return {}

    def _stateful_callbacks(self) -> list[pl.Callback]:
        """Return the user's callbacks that see validation batches, and whose state differs by rank.

        The check calls only these, because a callback that writes would write twice.
        """
        hook = "on_validation_batch_end"
        users = [
            callback
            for callback in callbacks_of(self.trainer)
            if package(type(callback)) not in FRAMEWORKS
            and getattr(type(callback), hook) is not getattr(pl.Callback, hook)
        ]
        states = [Snapshot(callback).fingerprint() for callback in users]
        by_rank = self.ranks.agree("its callbacks", states)
        return [c for i, c in enumerate(users) if any(other[i] != states[i] for other in by_rank)]
