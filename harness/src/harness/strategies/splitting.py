"""Split the arguments of a call by the rows of the batch, and join its outputs again.

In: the arguments, and the number of samples of the batch. Out: a share for each device. What has no
row for each sample is refused, because no number tells how it is to be split.
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

# Values that mean the same for every sample; other objects may hold one value per sample.
PLAIN = (numbers.Number, str, bytes, type(None), enum.Enum, slice, torch.dtype, torch.device)


def split(
    arguments: Mapping[str, Any],
    devices: Sequence[torch.device],
    batch_sizes: Collection[int],
    whole: Collection[str] = (),
) -> list[tuple[dict[str, Any], int]]:
    """Give each device its part of the arguments of a call, with the number of rows.

    A tensor of as many rows (dimension 0) as the batch has samples is split as `torch.chunk` does,
    or one of a multiple, as several views of each sample have. Scalars, tensors of one row, plain
    values and the arguments in `whole` go whole to every device. Tensors that are not on the first
    device stay where they are: `pack_padded_sequence` takes its lengths on the CPU.
    There are several `batch_sizes` where several loaders give a batch.

    Raises:
        UserError: names an argument that is anything else.
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
                "tensors with one row per sample, name what all samples share, as in "
                f"trainer.strategy.whole_inputs=[{name}], or use strategy=ddp."
            )
    sizes = [len(rows) for rows in torch.arange(num_rows or 1).chunk(len(devices))]

    def part(value: Any, name: str, index: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name not in whole and value.dim() and len(value) == num_rows:
            value = value.chunk(len(devices))[index]
        # Only the first device may see the caller's memory, the others get copies.
        device = devices[index] if value.device == devices[0] else value.device
        return value.to(device, non_blocking=True, copy=index > 0)

    return [
        ({k: map_leaves(partial(part, name=k, index=i), v) for k, v in arguments.items()}, size)
        for i, size in enumerate(sizes)
    ]


def _problem(tree: Any, num_rows: int) -> str:
    """Return why an argument cannot be split; nothing if it has the rows, or all share it."""
    if (children := _children(tree)) is not None:
        values = list(children.values())
        if len(values) == num_rows > 1 and all(isinstance(value, PLAIN) for value in values):
            return "is a list of one value per sample, which is split as a tensor only"
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
    """Concatenate outputs along dimension 0, if they have a row for each row of their shares.

    Raises:
        UserError: they have not, or differ in another way.
    """

    def joined(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, Tensor):
            if all(x is first or (isinstance(first, PLAIN) and x == first) for x in leaves):
                return first
            raise _refusal(f"{type(first).__name__} values that differ between the devices")
        if first.dim() == 0 and scalar_outputs == "mean":
            terms = (x.to(first.device) * n for x, n in zip(leaves, sizes, strict=True))
            return sum(terms) / sum(sizes)
        if first.dim() == 0:
            raise _refusal("a scalar (a mean over samples: trainer.strategy.scalar_outputs=mean)")
        shapes = ", ".join(str(tuple(x.shape)) for x in leaves)
        if [len(x) for x in leaves] != list(sizes):
            raise _refusal(f"shapes {shapes} for {list(sizes)} samples")
        if any(x.shape[1:] != first.shape[1:] for x in leaves):
            raise _refusal(f"shapes {shapes}; pad with total_length=x.shape[1]")
        return torch.cat([x.to(first.device, non_blocking=True) for x in leaves])

    return map_leaves(joined, *outputs)


def _refusal(outputs: str) -> UserError:
    return UserError(
        f"forward() returned {outputs}.\nEach device sees its samples alone: return tensors with "
        "one row per sample, and compute the loss in the step."
    )


def map_leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply `function` to the leaves of equal trees of lists, tuples, mappings and dataclasses."""
    first, nodes = trees[0], [_children(tree) for tree in trees]
    kinds = {(type(tree).__name__, *(node or ())) for tree, node in zip(trees, nodes, strict=True)}
    if len(kinds) > 1:
        names = " and ".join(sorted({name for name, *_ in kinds}))
        raise _refusal(f"unequal {names} on the devices")
    if nodes[0] is None:
        return function(*trees)
    values = {key: map_leaves(function, *(node[key] for node in nodes if node)) for key in nodes[0]}
    if isinstance(first, (list, tuple)):
        items = values.values()
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    result = copy.copy(first)  # preserves the other attributes, as a Hugging Face output has
    for key, value in values.items():
        if isinstance(first, Mapping):
            result[key] = value
        else:
            object.__setattr__(result, key, value)  # also in a frozen dataclass
    return result


def _children(tree: Any) -> dict[Any, Any] | None:
    """Return a container's children by their keys; None for a leaf."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None
