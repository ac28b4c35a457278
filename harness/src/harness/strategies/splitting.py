"""Split the inputs of a call by sample, and join the outputs again."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from harness.errors import UserError


class Share(NamedTuple):
    """The arguments of a call for one device."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_samples: int


def share_sizes(num_samples: int, num_devices: int) -> list[int]:
    """Samples per device as `torch.chunk` splits them: 30 on 2 is 15/15, 9 on 8 is 2/2/2/2/1."""
    size = max(1, -(-num_samples // num_devices))
    return [min(size, num_samples - start) for start in range(0, num_samples, size)]


def split(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: Sequence[torch.device],
    whole: frozenset[int | str] = frozenset(),
    batch_sizes: Sequence[int] = (),
) -> list[Share]:
    """Split the samples of a call over the devices, with at most one share per device.

    Tensors of as many rows as `num_rows` finds are split along dimension 0. Scalars, tensors of
    size 1, everything that is not a tensor and the arguments in `whole` (positions or keywords) go
    whole to every device. Tensors that are not on the first device stay where they are: the lengths
    that `pack_padded_sequence` takes must be on the CPU.

    Args:
        args: of the call, by position.
        kwargs: of the call, by name.
        devices: one per share.
        whole: positions and names of arguments that are not split.
        batch_sizes: samples in the batch, of each loader that gives a part of it; empty where
            nobody knows, as for a stream or a call outside of a step.

    Raises:
        UserError: an argument is neither per-sample nor the same for every sample.
    """
    named: dict[int | str, Any] = dict(enumerate(args)) | kwargs
    batched = [value for name, value in named.items() if name not in whole]
    num_samples = num_rows(batched, batch_sizes)
    sizes, root = share_sizes(num_samples, len(devices)), devices[0]
    if len(sizes) < 2:
        return [Share(args, kwargs, num_samples)]

    def share(leaf: Any, *, name: int | str, start: int, size: int, device: torch.device) -> Any:
        if name not in whole:
            _check_leaf(leaf, name, num_samples)
        rows = _num_rows(leaf)
        if rows is None:
            return leaf
        is_split = name not in whole and rows == num_samples
        if is_split:
            leaf = leaf.narrow(0, start, size)
        # Only the first device may see the caller's memory; the others get copies, also on a CPU.
        target = device if leaf.device == root else leaf.device
        return leaf.to(target, non_blocking=True, copy=start > 0)

    shares, start = [], 0
    for device, size in zip(devices, sizes, strict=False):
        on_device = functools.partial(share, start=start, size=size, device=device)
        own = {k: map_leaves(functools.partial(on_device, name=k), v) for k, v in named.items()}
        positional = tuple(own[i] for i in range(len(args)))
        shares.append(Share(positional, {name: own[name] for name in kwargs}, size))
        start += size
    return shares


def num_rows(batched: Any, batch_sizes: Sequence[int]) -> int:
    """The rows that belong to samples in the arguments of a call; 1 if nothing is to be split.

    The size of the batch where a tensor has it; else a multiple of it, as two views of each sample
    have in one tensor; else, as for a selection of the samples, dimension 0 of the first tensor
    where it is not 1. A batch of one sample is not split: what else has rows is not a sample.
    """
    found = (_num_rows(leaf) for _, leaf in leaves_of(batched))
    rows = [n for n in found if n is not None and n != 1]
    sizes = [size for size in batch_sizes if size > 1]
    if batch_sizes and not sizes:
        return 1
    same = [n for n in rows if n in sizes]
    multiples = [n for n in rows if n and any(n % size == 0 for size in sizes)]
    return (same or multiples or rows or [1])[0]


def signature(
    args: tuple[Any, ...], kwargs: dict[str, Any], whole: frozenset[int | str], rows: int
) -> tuple[Any, ...]:
    """What distinguishes kinds of calls: the dimensions of tensors, and which of them are split."""
    named: dict[int | str, Any] = dict(enumerate(args)) | kwargs
    return tuple(
        (name, path, leaf.dim(), name not in whole and _num_rows(leaf) == rows)
        for name, value in named.items()
        for path, leaf in leaves_of(value)
        if isinstance(leaf, Tensor)
    )


def leaves_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their places in it, as in ``["logits"][0]``."""
    keys = _keys(tree)
    if keys is None:
        yield path, tree
    for key in keys or ():
        yield from leaves_of(_child(tree, key), f"{path}[{key!r}]")


def join(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    scalar_outputs: Literal["error", "mean"] = "error",
) -> Any:
    """Concatenate the replicas' outputs along dimension 0, where the first one's are.

    Raises:
        UserError: an output does not have one row per sample, or rows of another shape on
            another device.
    """

    def joined(*outputs: Any) -> Any:
        first, rows = outputs[0], [_num_rows(output) for output in outputs]
        if not isinstance(first, Tensor):
            if all(output is first or _is_equal(output, first) for output in outputs):
                return first
            what = f"{_kind(first)} values that differ between the devices"
        elif first.dim() == 0 and scalar_outputs == "mean":
            terms = (output.to(first.device) * n for output, n in zip(outputs, sizes, strict=True))
            return sum(terms) / sum(sizes)
        elif first.dim() == 0:
            raise UserError(
                "forward() returned a scalar, which is not per-sample.\n"
                "Compute the loss in training_step, or set trainer.strategy.scalar_outputs=mean\n"
                "if the scalar is a mean over samples."
            )
        elif rows == list(sizes):
            return _concatenated(outputs)
        else:
            what = (
                f"shapes {_shapes(outputs)} for {list(sizes)} samples: dimension 0 is not the batch"
            )
        raise UserError(f"forward() returned {what}.\n{_PER_SAMPLE}")

    return map_leaves(joined, *outputs)


def _concatenated(outputs: Sequence[Tensor]) -> Tensor:
    if any(output.shape[1:] != outputs[0].shape[1:] for output in outputs):
        raise UserError(
            f"forward() returned shapes {_shapes(outputs)}: each device sees its samples alone.\n"
            "Pad to the length of the batch: pad_packed_sequence(..., total_length=x.shape[1])."
        )
    return torch.cat([output.to(outputs[0].device, non_blocking=True) for output in outputs])


def _shapes(outputs: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(output.shape)) for output in outputs)


_PER_SAMPLE = (
    "Return tensors with one row per sample, in the same structure for any share of a batch,\n"
    "and reshape or reduce them in the step."
)


def map_leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply `function` to the leaves of equal trees of lists, tuples, mappings and dataclasses."""
    first, keys = trees[0], _keys(trees[0])
    if any(type(tree) is not type(first) or _keys(tree) != keys for tree in trees):
        found = " and ".join(sorted({_kind(tree) for tree in trees}))
        raise UserError(f"forward() returned unequal {found} on the devices.\n{_PER_SAMPLE}")
    if keys is None:
        return function(*trees)
    values = [map_leaves(function, *(_child(tree, key) for tree in trees)) for key in keys]
    if isinstance(first, (list, tuple)):
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    result = copy.copy(first)  # keeps what else a defaultdict or a Hugging Face output has
    for key, value in zip(keys, values, strict=True):
        if isinstance(first, Mapping):
            result[key] = value
        else:
            object.__setattr__(result, key, value)  # also in a frozen dataclass
    return result


def _keys(tree: Any) -> list[Any] | None:
    """The keys of a container's children; None for a leaf, such as a list of strings or numbers."""
    if isinstance(tree, Mapping):
        return list(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [field.name for field in dataclasses.fields(tree)]
    if isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        return None if _is_text(tree) or _is_numbers(tree) else list(range(len(tree)))
    return None


def _child(tree: Any, key: Any) -> Any:
    return tree[key] if isinstance(tree, (Mapping, list, tuple)) else getattr(tree, key)


def _num_rows(leaf: Any) -> int | None:
    """The size of a tensor's dimension 0, 1 for a scalar."""
    if isinstance(leaf, Tensor):
        return len(leaf) if leaf.dim() > 0 else 1
    return None


def _check_leaf(leaf: Any, name: int | str, num_samples: int) -> None:
    """Refuse a leaf that is neither per-sample nor the same for every sample."""
    if (rows := _num_rows(leaf)) is not None:
        if rows in (1, num_samples):
            return
        what = f"has shape {tuple(leaf.shape)}, but the batch has {num_samples} samples"
    elif isinstance(leaf, (list, tuple)) and _is_text(leaf):
        if len(leaf) != num_samples:
            return
        what = "holds one string per sample, which cannot be split"
    elif isinstance(leaf, list) and _is_numbers(leaf):
        if len(leaf) != num_samples:
            return
        what = "holds one number per sample, which is split as a tensor only"
    elif (
        isinstance(leaf, (nn.Module, Iterator))
        or hasattr(leaf, "to")
        or getattr(leaf, "shape", ()) != ()  # numpy arrays and the like
        or any(isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values())
    ):
        what = f"is a {_kind(leaf)}, which cannot be split by sample"
    else:
        return
    label = f"Argument {name + 1} of forward()" if isinstance(name, int) else f"forward({name}=…)"
    raise UserError(
        f"{label} {what}.\n"
        "Pass tensors with one row per sample; what is the same for every sample can be a buffer,\n"
        "or be named in trainer.strategy.whole_inputs. strategy=ddp shares samples before they\n"
        "are collated, and splits nothing here."
    )


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays compare by element
        return False


def _is_text(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, (str, bytes)) for value in values)


def _is_numbers(values: Sequence[Any]) -> bool:
    """Whether it is a list of numbers, such as lengths; a tuple rather is a size of something."""
    is_list = isinstance(values, list) and bool(values)
    return is_list and all(isinstance(value, (int, float)) for value in values)


def _kind(value: Any) -> str:
    return type(value).__name__
