"""Whether a split call gives what the same call gives on the whole batch, found out by trying both.

No number tells a batch of 8 samples from 8 steps of time, 8 nodes, or a mask of 8 rows. So the call
is made on twins of the module, whole and split, as `trial` makes calls, and what comes out and what
was written are compared.
"""

import inspect
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harness.errors import UserError

from .differences import difference, tolerance
from .replica import Replica
from .splitting import join, leaves_of, map_leaves, signature, split
from .trial import UndecidableError, fresh_twin, untraced, written

log = logging.getLogger(__name__)

# A network whose last layer begins with zeros shows nothing at its first call.
CALLS_COMPARED = (1, 2, 4, 10, 30, 100, 300, 1000)
MOST_KINDS = 16  # of calls that differ in their arguments


class Comparison:
    """Compares calls of each kind: the first, and few later ones.

    Args:
        module: lives on ``root``.
        root: where all shares of a trial run, one after the other.
        num_shares: shares of a call.
        whole: positions and names of arguments that are not split.
        scalar_outputs: see ``NodeParallelStrategy``.
    """

    def __init__(
        self,
        module: nn.Module,
        root: torch.device,
        num_shares: int,
        whole: frozenset[int | str],
        scalar_outputs: Literal["error", "mean"],
    ) -> None:
        self.module, self.root, self.whole = module, root, whole
        self.devices, self.scalar_outputs = [root] * num_shares, scalar_outputs
        self.num_calls: Counter[Any] = Counter()
        self.proven: set[Any] = set()
        self.told: set[str] = set()

    def allows(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch_sizes: Sequence[int], rows: int
    ) -> bool:
        """Whether a call may be split: its rows are samples, or have proven to be as good.

        Raises:
            UserError: see ``compare``.
        """
        kind = (self.module.training, signature(args, kwargs, self.whole, rows))
        if kind in self.num_calls or len(self.num_calls) < MOST_KINDS:
            self.num_calls[kind] += 1
        if self.num_calls[kind] in CALLS_COMPARED:
            is_proven = self.compare(args, kwargs, batch_sizes)
            self.proven |= {kind} if is_proven else set()
        if not batch_sizes or any(rows % n == 0 for n in batch_sizes) or kind in self.proven:
            return True
        self._tell(
            f"forward() of {type(self.module).__name__} gets {rows} rows, the batch has "
            f"{' and '.join(map(str, batch_sizes))} samples, and whether it treats each row by "
            f"itself cannot be found out: such calls run on {self.root} alone."
        )
        return False

    def compare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch_sizes: Sequence[int],
        with_grad: bool = False,
    ) -> bool:
        """Whether the split call is found to give what the whole one gives; False if undecided.

        Raises:
            UserError: the outputs differ, a share of the batch fails, or forward writes into a
                parameter or a buffer what depends on its samples.
        """
        replica = Replica(self.module, self.root)
        try:
            given, copies = (map_leaves(_clone, (args, kwargs)) for _ in range(2))
            with untraced(self.root, with_grad):
                twin = fresh_twin(replica, self.root)
                expected = twin.forward(*given[0], **given[1])
                writes = written(self.module, twin)
        except Exception as error:  # as it is, on one device; or too large for one
            is_decided = isinstance(error, (torch.OutOfMemoryError, UndecidableError))
            if is_decided or with_grad or not torch.is_grad_enabled():
                return self._undecided(error)
            return self.compare(args, kwargs, batch_sizes, with_grad=True)  # forces need gradients
        shares = split(copies[0], copies[1], self.devices, self.whole, batch_sizes)
        sizes, parts = [share.num_samples for share in shares], []
        writes_of_share: dict[str, Any] = {}
        try:
            with untraced(self.root, with_grad):
                for share in shares:
                    twin = fresh_twin(replica, self.root)
                    parts.append(twin.forward(*share.args, **share.kwargs))
                    if len(parts) == 1 and writes:
                        writes_of_share = written(self.module, twin)
        except (torch.OutOfMemoryError, UndecidableError) as error:
            return self._undecided(error)
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"forward() takes the {sum(sizes)} rows of the batch, and fails on {sizes[0]} of "
                f"them: {type(error).__name__}: {said}\n{self._advice(args, kwargs)}"
            ) from error
        finally:
            replica.release()
        if self.module.training:
            self._check_writes(writes, writes_of_share, sizes)
        try:
            found = join(parts, sizes, self.scalar_outputs)
        except UserError as error:  # which the call itself will say
            return self._undecided(error)
        self._check_outputs(dict(leaves_of(expected)), dict(leaves_of(found)), sizes, args, kwargs)
        return True

    def _check_outputs(
        self,
        expected: dict[str, Any],
        found: dict[str, Any],
        sizes: Sequence[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        limit = tolerance(self.module, self.root)
        for name in [*expected, *(found.keys() - expected.keys())]:
            far = math.inf
            if name in expected and name in found:
                far = difference(expected[name], found[name], limit)
            if far > limit:
                how = f"{far:.2%} off" if math.isfinite(far) else "of another shape or type"
                which = f"the output {name}" if name else "an output"
                raise UserError(
                    f"forward() does not treat each row by itself: {which} is {how} when "
                    f"{sum(sizes)} rows are split into {' + '.join(map(str, sizes))}.\n"
                    f"{self._advice(args, kwargs)}"
                )

    def _check_writes(
        self, writes: dict[str, Any], writes_of_share: dict[str, Any], sizes: Sequence[int]
    ) -> None:
        limit = tolerance(self.module, self.root)
        for name, value in writes.items():
            if difference(value, writes_of_share.get(name), limit) <= limit:
                continue
            path, _, own = name.rpartition(".")
            owner = self.module.get_submodule(path)
            which = f"{own} of {type(owner).__name__}"
            kept = f"from its samples, and of {sum(sizes)} only the first {sizes[0]} would count"
            if own in dict(owner.named_buffers(recurse=False)):
                what = f"Buffer {which}"
            elif own in dict(owner.named_parameters(recurse=False)):
                what = f"Parameter {which}"
            else:
                self._tell(
                    f"forward() writes {which} {kept}. Return it from forward() if the step "
                    "reads it."
                )
                continue
            raise UserError(
                f"{what} is written by forward() {kept}.\n"
                "Write it in training_step after self(...), where the whole batch is seen, or use "
                "strategy=ddp.\n"
                "If it does not matter: trainer.strategy.check_forward=false."
            )

    def _advice(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What to type, with the names of this module."""
        names = list(inspect.signature(type(self.module).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        square = [name for name, t in tensors.items() if t.dim() == 2 and len(t) == t.shape[1]]
        parts = [
            name
            for name, child in self.module.named_children()
            if next(child.parameters(), None) is not None
        ]
        ways = ["strategy=ddp"]
        if parts:
            ways.insert(0, f"trainer.strategy.modules=[{parts[0]}] if that part does")
        if square and len(given) > 1:
            ways.insert(0, f"trainer.strategy.whole_inputs=[{square[-1]}] if it is no batch")
        if any(t.dim() > 2 for t in tensors.values()):
            ways.insert(0, "batch_first=True if dimension 0 is time")
        return (
            f"Use {', '.join(ways[:-1])}{' or ' if ways[1:] else ''}{ways[-1]}.\n"
            "If it is meant, use trainer.strategy.check_forward=false."
        )

    def _undecided(self, reason: object) -> bool:
        log.info(
            "A split call of %s was not compared with a whole one: %s",
            type(self.module).__name__,
            reason,
        )
        return False

    def _tell(self, text: str) -> None:
        if text not in self.told:
            self.told.add(text)
            log.warning("%s", text)


def _clone(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    copied = leaf.detach().clone()
    return copied.requires_grad_() if leaf.requires_grad else copied
