"""Split the inputs of a call by sample, and join the outputs again."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from project.errors import UserError


class Share(NamedTuple):
    """One device's part of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_samples: int


def share_sizes(num_samples: int, num_devices: int) -> list[int]:
    """Samples per device as `torch.chunk` deals them: 30 on 2 is 15/15, 9 on 8 is 2/2/2/2/1."""
    size = max(1, -(-num_samples // num_devices))
    return [min(size, num_samples - start) for start in range(0, num_samples, size)]


def split(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: Sequence[torch.device],
    whole: frozenset[int | str] = frozenset(),
) -> list[Share]:
    """Deal the samples of a call to the devices, at most one share per device.

    The first tensor whose dimension 0 is not 1 tells the batch size. Tensors of that size are split
    along dimension 0. Scalars, tensors of size 1 and everything that is not a tensor go whole
    to every device, as do the arguments in `whole` (positions or keywords).

    Raises:
        UserError: an argument is neither per-sample nor the same for every sample.
    """
    named: dict[int | str, Any] = dict(enumerate(args)) | kwargs
    batched = [value for name, value in named.items() if name not in whole]
    num_samples = next((n for n in map(len, _batches(batched)) if n != 1), 1)
    sizes = share_sizes(num_samples, len(devices))
    if len(sizes) < 2:
        return [Share(args, kwargs, num_samples)]
    for name, value in named.items():
        if name not in whole:
            _refuse_what_cannot_be_split(name, value, num_samples)

    shares, start = [], 0
    for device, size in zip(devices, sizes, strict=False):
        parts = {
            name: map_leaves(_take(start, size, num_samples, device, name in whole), value)
            for name, value in named.items()
        }
        positional = tuple(parts[i] for i in range(len(args)))
        shares.append(Share(positional, {name: parts[name] for name in kwargs}, size))
        start += size
    return shares


def join(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    device: torch.device,
    scalar_outputs: Literal["error", "mean"] = "error",
) -> Any:
    """Concatenate the replicas' outputs along dimension 0 on `device`.

    Raises:
        UserError: an output does not have one row per sample.
    """

    def join_leaf(*parts: Any) -> Any:
        first = parts[0]
        if not isinstance(first, Tensor):
            if any(part is not first and part != first for part in parts):
                raise UserError(
                    f"forward() returned {_kind(first)} values that differ between the devices.\n"
                    "Return tensors with one row per sample and compute the rest in the step."
                )
            return first
        if first.dim() == 0:
            if scalar_outputs == "mean":
                terms = (p.to(device) * size for p, size in zip(parts, sizes, strict=True))
                return sum(terms) / sum(sizes)
            raise UserError(
                "forward() returned a scalar, which is not per-sample.\n"
                "Compute the loss in training_step, or set trainer.strategy.scalar_outputs=mean\n"
                "if the scalar is a mean over samples."
            )
        for part, size in zip(parts, sizes, strict=True):
            if len(part) != size:
                raise UserError(
                    f"forward() returned a tensor of shape {tuple(part.shape)} for {size} samples: "
                    "dimension 0 is not the batch.\n"
                    "Return one row per sample and reshape in the step."
                )
        return torch.cat([part.to(device, non_blocking=True) for part in parts])

    return map_leaves(join_leaf, *outputs)


def map_leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply `function` to the leaves of equal trees of lists, tuples, mappings and dataclasses."""
    first = trees[0]
    if any(type(tree) is not type(first) for tree in trees):
        raise UserError(
            f"forward() returned {' and '.join(sorted({_kind(t) for t in trees}))} "
            "on different devices.\nReturn the same structure for every part of the batch."
        )
    keys = _keys(first)
    if keys is None:
        return function(*trees)
    if any(_keys(tree) != keys for tree in trees):
        raise UserError(
            f"forward() returned a {_kind(first)} with other entries on each device.\n"
            "Return tensors with one row per sample, in the same structure for every part."
        )
    values = [map_leaves(function, *(_get(tree, key) for tree in trees)) for key in keys]
    if isinstance(first, (list, tuple)):
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    result = copy.copy(first)  # keeps what a defaultdict or a Hugging Face output carries besides
    for key, value in zip(keys, values, strict=True):
        if isinstance(first, Mapping):
            result[key] = value
        else:
            object.__setattr__(result, key, value)  # also in a frozen dataclass
    return result


def _keys(tree: Any) -> list[Any] | None:
    """What the children of a container are reached by; None for a leaf."""
    if isinstance(tree, Mapping):
        return list(tree)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        return list(range(len(tree)))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [field.name for field in dataclasses.fields(tree)]
    return None


def _get(tree: Any, key: Any) -> Any:
    return tree[key] if isinstance(tree, (Mapping, list, tuple)) else getattr(tree, key)


def _kind(value: Any) -> str:
    return type(value).__name__


def _batches(value: Any) -> Iterator[Tensor]:
    """The tensors with at least one dimension, in the order in which they were passed."""
    keys = _keys(value)
    if isinstance(value, Tensor) and value.dim() > 0:
        yield value
    for key in keys or ():
        yield from _batches(_get(value, key))


def _take(
    start: int, size: int, num_samples: int, device: torch.device, whole: bool
) -> Callable[[Any], Any]:
    """A function that takes one device's rows of a tensor.

    Only the first device may see the caller's memory; the others get copies, also on a CPU.
    """

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not whole and leaf.dim() > 0 and len(leaf) == num_samples:
            leaf = leaf.narrow(0, start, size)
        return leaf.to(device, non_blocking=True, copy=start > 0)

    return take


def _refuse_what_cannot_be_split(name: int | str, value: Any, num_samples: int) -> None:
    label = f"Argument {name + 1} of forward()" if isinstance(name, int) else f"forward({name}=…)"
    way_out = (
        "Pass tensors with one row per sample; what is the same for every sample can be a buffer,\n"
        "or be named in trainer.strategy.whole_inputs."
    )
    if isinstance(value, Tensor):
        if value.dim() > 0 and len(value) not in (1, num_samples):
            raise UserError(
                f"{label} has shape {tuple(value.shape)}, but the batch has {num_samples} samples: "
                f"dimension 0 is not the batch.\n{way_out}"
            )
        return
    keys = _keys(value)
    if keys is None:
        if _hides_samples(value):
            raise UserError(
                f"{label} is a {_kind(value)}, which cannot be split by sample.\n{way_out}"
            )
        return
    children = [_get(value, key) for key in keys]
    if len(children) == num_samples and all(isinstance(c, (str, bytes)) for c in children):
        raise UserError(f"{label} holds one string per sample, which cannot be split.\n{way_out}")
    for child in children:
        _refuse_what_cannot_be_split(name, child, num_samples)


def _hides_samples(leaf: Any) -> bool:
    """Whether an object that is not a tensor may hold per-sample data or device memory."""
    if isinstance(leaf, (nn.Module, Iterator, PackedSequence)) or hasattr(leaf, "to"):
        return True
    if getattr(leaf, "shape", ()) != ():  # numpy arrays and the like
        return True
    attributes = cast("dict[str, Any]", getattr(leaf, "__dict__", {}))
    return any(isinstance(value, Tensor) for value in attributes.values())
