"""Split the arguments of a call by the rows of the batch, and join its outputs again.

In: the arguments, and the number of samples in the batch. Out: one chunk of the arguments per
device. An argument without one row per sample raises an error, as it cannot be split.
"""

import copy
import dataclasses
import enum
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from harness.errors import UserError

# Types of values that all samples share; another object could hold one value per sample.
PLAIN = (numbers.Number, str, bytes, type(None), enum.Enum, slice, torch.dtype, torch.device)


def split(
    arguments: Mapping[str, Any],
    devices: Sequence[torch.device],
    batch_sizes: Collection[int],
    whole: Collection[str] = (),
) -> list[tuple[dict[str, Any], int]]:
    """Return each device's chunk of the arguments of a call, and its number of rows.

    - A tensor with one row (dimension 0) per sample is split as `torch.chunk` does. It may also
      have several rows per sample, such as several views of each image.
    - Scalars, tensors of one row, values of the types in `PLAIN`, and the arguments in `whole` go
      to every device.
    - A tensor that is not on the first device keeps its device: `pack_padded_sequence` needs
      lengths on the CPU.

    Args:
        arguments: the arguments by name.
        devices: one per chunk.
        batch_sizes: samples of the batch; several numbers if several loaders fill it.
        whole: names of arguments that are not split.

    Raises:
        UserError: an argument is none of these; the message names it.
    """
    leaves: list[Any] = []
    map_leaves(leaves.append, {n: value for n, value in arguments.items() if n not in whole})
    rows = [len(x) for x in leaves if isinstance(x, Tensor) and x.dim() and len(x) != 1]
    views = [n for n in rows if any(size > 1 and n % size == 0 for size in batch_sizes)]
    num_rows = next((n for n in rows if n in batch_sizes), next(iter(views), 1))
    for name, value in arguments.items():
        if name not in whole and (problem := _problem(value, num_rows)):
            samples = " and ".join(map(str, sorted(batch_sizes)))
            raise UserError(
                f"Argument {name} of forward() {problem}; the batch has {samples} samples.\nPass "
                "tensors with one row per sample. If all samples share the argument, set "
                f"trainer.strategy.whole_inputs=[{name}], or use strategy=ddp."
            )
    sizes = [len(rows) for rows in torch.arange(num_rows or 1).chunk(len(devices))]

    def chunk(value: Any, name: str, index: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name not in whole and value.dim() and len(value) == num_rows:
            value = value.chunk(len(devices))[index]
        # Only the first chunk may share the caller's memory; the others are copies.
        device = devices[index] if value.device == devices[0] else value.device
        return value.to(device, non_blocking=True, copy=index > 0)

    return [
        ({k: map_leaves(partial(chunk, name=k, index=i), v) for k, v in arguments.items()}, size)
        for i, size in enumerate(sizes)
    ]


def _problem(tree: Any, num_rows: int) -> str:
    """Return why an argument cannot be split, or "" if it is of a kind that ``split`` lists."""
    if (children := _children(tree)) is not None:
        values = list(children.values())
        if len(values) == num_rows > 1 and all(isinstance(value, PLAIN) for value in values):
            return "is a list of one value per sample, which must be a tensor to be split"
        return next(filter(None, (_problem(value, num_rows) for value in values)), "")
    if isinstance(tree, Tensor):
        fits = tree.dim() == 0 or len(tree) in (1, num_rows)
        return "" if fits else f"has shape {tuple(tree.shape)}"
    if isinstance(tree, PLAIN) or (callable(tree) and not isinstance(tree, nn.Module)):
        return ""
    return f"holds a {type(tree).__name__}, which cannot be split by sample"


def join(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    scalar_outputs: Literal["error", "mean"] = "error",
) -> Any:
    """Concatenate the chunks' outputs along dimension 0.

    Args:
        outputs: the outputs of each chunk: tensors, or containers of them.
        sizes: the rows of each chunk.
        scalar_outputs: "mean" averages scalars, weighted by ``sizes``; "error" refuses them.

    Raises:
        UserError: a tensor has another number of rows than its chunk, or the outputs differ in
            structure or in values that are not tensors.
    """

    def join_leaves(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, Tensor):
            if all(x is first or (isinstance(first, PLAIN) and x == first) for x in leaves):
                return first
            raise _refusal(f"{type(first).__name__} values that differ between the devices")
        if first.dim() == 0 and scalar_outputs == "mean":
            terms = (x.to(first.device) * n for x, n in zip(leaves, sizes, strict=True))
            return sum(terms) / sum(sizes)
        if first.dim() == 0:
            raise _refusal(
                "a scalar; if it is a mean over samples, set trainer.strategy.scalar_outputs=mean"
            )
        shapes = ", ".join(str(tuple(x.shape)) for x in leaves)
        if [len(x) for x in leaves] != list(sizes):
            raise _refusal(f"shapes {shapes} for {list(sizes)} samples")
        if any(x.shape[1:] != first.shape[1:] for x in leaves):
            raise _refusal(f"shapes {shapes}; pad with total_length=x.shape[1]")
        return torch.cat([x.to(first.device, non_blocking=True) for x in leaves])

    return map_leaves(join_leaves, *outputs)


def _refusal(outputs: str) -> UserError:
    return UserError(
        f"forward() returned {outputs}.\nEach device computes only its own samples: return "
        "tensors with one row per sample, and compute the loss in the step."
    )


def map_leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply `function` to the corresponding leaves of trees with the same structure.

    A tree consists of lists, tuples, mappings and dataclasses.

    Raises:
        UserError: the trees differ in structure.
    """
    first, nodes = trees[0], [_children(tree) for tree in trees]
    kinds = {(type(tree).__name__, *(node or ())) for tree, node in zip(trees, nodes, strict=True)}
    if len(kinds) > 1:
        names = " and ".join(sorted({name for name, *_ in kinds}))
        raise _refusal(f"{names}, which differ in structure between the devices")
    if nodes[0] is None:
        return function(*trees)
    values = {key: map_leaves(function, *(node[key] for node in nodes if node)) for key in nodes[0]}
    if isinstance(first, (list, tuple)):
        items = values.values()
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    result = copy.copy(first)  # keeps further attributes, which Hugging Face outputs have
    for key, value in values.items():
        if isinstance(first, Mapping):
            result[key] = value
        else:
            object.__setattr__(result, key, value)  # also in a frozen dataclass
    return result


def _children(tree: Any) -> dict[Any, Any] | None:
    """Return a container's children by key, or None for a leaf."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None
