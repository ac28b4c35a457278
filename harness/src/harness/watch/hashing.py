"""Hash tensors to 64 bits each, on their device."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Integers hashed at once; a CPU keeps this many, and what is computed of them, in its cache.
CHUNK = {"cpu": 2**16}
LARGE_CHUNK = 2**22
GOLDEN = 0x9E3779B97F4A7C15  # the golden ratio's 64 bits: its multiples have no pattern


@torch.no_grad()
def hashes(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Hash each tensor's bits, shape (len(tensors),), int64; nothing is copied to the host."""
    factors = odd_factors(CHUNK.get(device.type, LARGE_CHUNK), device)
    hashed = [hash_bits(tensor.to(device), factors) for tensor in tensors]
    return torch.stack(hashed) if hashed else torch.empty(0, dtype=torch.int64, device=device)


def hash_bits(tensor: Tensor, factors: Tensor) -> Tensor:
    """Sum a tensor's integers, each times an odd factor of its place, modulo 2^64.

    One changed integer always changes the sum, because an odd factor has an inverse modulo 2^64;
    several that cancel by chance are as unlikely as a random 64-bit number to be guessed.
    """
    flat = tensor.detach().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    bits = flat.view(-1).view(INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, chunk in enumerate(torch.split(bits, len(factors))):
        # Each chunk has an odd factor as well, so that exchanged chunks differ. It is none of the
        # elements' own: element i of chunk j and element j of chunk i must not share a product.
        factor = (i * GOLDEN | 1) % 2**64
        signed = factor - 2**64 if factor >= 2**63 else factor
        total += (chunk * factors[: len(chunk)]).sum() * signed
    return total


@lru_cache(maxsize=1)
def odd_factors(number: int, device: torch.device) -> Tensor:
    """Make fixed odd 64-bit integers without a pattern, shape (number,)."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(-(2**63), 2**63 - 1, (number,), generator=generator)
    return (numbers | 1).to(device)
