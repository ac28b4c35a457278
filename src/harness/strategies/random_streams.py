"""Different random numbers on different devices."""

from collections.abc import Iterable

import torch


def device_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The default generators of the distinct GPUs among `devices`, in their order."""
    indices = dict.fromkeys(device.index for device in devices if device.type == "cuda")
    return [torch.cuda.default_generators[index] for index in indices]


def separate(generators: list[torch.Generator]) -> None:
    """Reseed generators that were seeded like the first one.

    `torch.manual_seed` gives every GPU the same seed, so that all replicas would drop the same
    units. The first generator is never touched, and a second call changes nothing; after the
    next `manual_seed` the streams are separated again, in the same way.
    """
    first, *others = generators
    seed = first.initial_seed()
    for offset, generator in enumerate(others, start=1):
        if generator.initial_seed() == seed:
            generator.manual_seed((seed + offset) % 2**63)
