"""The numbers that an author's samplers count in attributes, as ``self.num_epochs += 1``.

In: a batch sampler. Out: what of these a checkpoint keeps, so that a run that goes on inside an
epoch draws that epoch again from its beginning.
"""

from typing import Any

from torch.utils.data import Sampler

NUMBERS = (bool, int, float)


class SamplerNumbers:
    """Note which numbers of samplers have changed since they were made.

    Args:
        batches: a batch sampler, which may hold others.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.initial = numbers_in(batches)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Note them before the first batch of an epoch is drawn."""
        self.at_start = self.changed()

    def changed(self) -> list[dict[str, Any]]:
        """The numbers of each sampler that are not as they were made."""
        return [
            {name: value for name, value in now.items() if before.get(name) != value}
            for now, before in zip(numbers_in(self.batches), self.initial, strict=False)
        ]

    def restore(self, saved: list[dict[str, Any]]) -> None:
        """Give the samplers the numbers of a checkpoint."""
        for sampler, numbers in zip(samplers_in(self.batches), saved, strict=False):
            vars(sampler).update(numbers)
        self.begin_epoch()


def numbers_in(batches: Any) -> list[dict[str, Any]]:
    """The numbers among the attributes of each sampler of a batch sampler."""
    attributes = [getattr(sampler, "__dict__", {}) for sampler in samplers_in(batches)]
    return [{n: v for n, v in own.items() if type(v) in NUMBERS} for own in attributes]


def samplers_in(batches: Any) -> list[Any]:
    """Find the samplers that a batch sampler, or one of those, holds, and itself."""
    found = [batches]
    for sampler in found:
        held = vars(sampler).values() if hasattr(sampler, "__dict__") else ()
        found += [s for s in held if isinstance(s, Sampler) and all(s is not f for f in found)]
    return found
