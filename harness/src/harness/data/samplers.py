"""Find the samplers within a batch sampler, and the numbers that they count."""

from typing import Any

from torch.utils.data import Sampler

NUMBERS = (bool, int, float)


def samplers_in(batches: Any) -> list[Any]:
    """Return a batch sampler, and all samplers that it holds, directly or within others."""
    samplers = [batches]
    for sampler in samplers:  # the loop appends to it
        held = vars(sampler).values() if hasattr(sampler, "__dict__") else ()
        samplers += [
            s for s in held if isinstance(s, Sampler) and all(s is not x for x in samplers)
        ]
    return samplers


def numbers_in(batches: Any) -> list[dict[str, Any]]:
    """Return, for each sampler in a batch sampler, the attributes that are numbers."""
    attributes = [getattr(sampler, "__dict__", {}) for sampler in samplers_in(batches)]
    return [{n: v for n, v in held.items() if type(v) in NUMBERS} for held in attributes]
