"""Convert between floating types block by block: the numbers of torch's `Tensor.to`.

A NaN stays a NaN, though not always with the same bits.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .tensors import CheckpointError

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def caster(source: str, target: str) -> Callable[[memoryview], memoryview]:
    """Return the conversion of a block from `source` to float32, float16 or bfloat16.

    Raises:
        CheckpointError: now, if the source type has no conversion; from the returned function,
            if a finite number would become infinite.
    """
    import numpy as np

    def decode(raw: "Array") -> "Array":
        if source == "bfloat16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return raw.view(source)

    def encode(single: "Array") -> "Array":
        if target != "bfloat16":
            return single.astype(target)
        bits = single.view(np.uint32)
        nearest_even = bits + 0x7FFF + ((bits >> 16) & 1)
        return (np.where(np.isnan(single), bits | 0x400000, nearest_even) >> 16).astype(np.uint16)

    def cast(chunk: memoryview) -> memoryview:
        values = decode(np.frombuffer(chunk, np.uint8))
        with np.errstate(over="ignore", invalid="ignore"):
            result = encode(values.astype(np.float32))  # float64 goes by float32 in torch too
        infinite = (result & 0x7FFF) == 0x7F80 if target == "bfloat16" else np.isinf(result)
        if np.any(infinite & np.isfinite(values)):
            raise CheckpointError(f"a value is too large for {target}; use --dtype keep")
        return result.view(np.uint8).data

    if source not in _SOURCES:
        raise CheckpointError(f"{source} cannot become {target}; use --dtype keep")
    return cast


_SOURCES = ("float64", "float32", "float16", "bfloat16")
