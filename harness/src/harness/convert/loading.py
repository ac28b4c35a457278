"""Weights of a checkpoint as tensors in memory: what there is, is known before it is read."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .choose import Chosen, choose
from .names import Names
from .places import holds_tensors, is_odd_tensor, is_tensor, key_for, places_of
from .read import Checkpoint
from .sources import checked, printable
from .stream import check, stream
from .tensors import CheckpointError, Record, Tensor

if TYPE_CHECKING:
    import torch


@dataclass
class Weights:
    """The weights in an open checkpoint, by the names that the bare network has for them."""

    checkpoint: Checkpoint
    key: str  # the entry of the file that holds them, in words
    tensors: dict[str, Tensor]  # types and shapes; no byte of theirs is read
    sources: dict[str, str]  # their names in the file
    left_out: list[str]  # the module's other weights
    dropped: list[str]  # what else the file holds
    notes: list[str]  # what a user should know besides
    _read: dict[Any, "torch.Tensor"] = field(default_factory=dict)
    _checked: set[Record] = field(default_factory=set)

    def read(self, names: Iterable[str]) -> dict[str, "torch.Tensor"]:
        """Read some of them, each byte once; names of the same weights share their memory.

        Raises:
            CheckpointError: the file is damaged.
        """
        found: dict[str, torch.Tensor] = {}
        for name in names:
            view = self.tensors[name].view
            if view not in self._read:
                try:
                    self._read[view] = self._one(self.tensors[name], name)
                except CheckpointError as error:
                    raise CheckpointError(f"{name}: {error}") from error
            found[name] = self._read[view]
        return found

    def _one(self, tensor: Tensor, name: str) -> "torch.Tensor":
        import torch

        value = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        flat: Any = value.reshape(-1)  # the same memory
        buffer = memoryview(flat.view(torch.uint8).numpy() if tensor.numel else b"")
        position, crc = 0, 0
        for chunk in stream(tensor, tensor.dtype):
            buffer[position : position + len(chunk)] = chunk
            position += len(chunk)
            crc = zlib.crc32(chunk, crc)
        if tensor.stated_crc is None:
            for record in {*tensor.records} - self._checked:
                check(record, name)
                self._checked.add(record)
        elif crc != tensor.stated_crc:
            raise CheckpointError("damaged: it does not match its checksum; copy the file again")
        return value


@contextmanager
def opened(
    source: str | Path,
    *,
    key: str | None = None,
    prefix: str = "auto",
    ema: bool = True,
    keep_module: bool = False,
) -> Iterator[Weights]:
    """Open a checkpoint and find its weights; arguments as of ``convert``.

    Raises:
        UserError: there is no such file.
        CheckpointError: it is none, is damaged, holds no weights without doubt, or changed
            while the block read it.
    """
    source = checked(source)
    try:
        with Checkpoint(source) as checkpoint:
            chosen = choose(checkpoint.root, key, ema, checkpoint.budget)
            keeps = keep_module or chosen.is_exact
            names = Names(chosen.state, prefix, chosen.is_lightning, keeps, ema)
            tensors, left_out, dropped = _selected(chosen, names.new)
            sources = {new: old for old, new in names.new.items() if new in tensors}
            dropped, notes = chosen.rest + dropped, chosen.notes + names.notes
            yield Weights(checkpoint, chosen.key, tensors, sources, left_out, dropped, notes)
            checkpoint.check_unchanged()
    except CheckpointError as error:
        raise CheckpointError(printable(f"{source}: {error}")) from error


def _selected(
    chosen: Chosen, new_names: Mapping[str, str]
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Return the network's tensors, and in words its module's other ones, and what is no tensor."""
    tensors: dict[str, Tensor] = {}
    left_out: list[str] = []
    dropped: list[str] = []
    seen: set[int] = set()
    for old, value in chosen.state.items():
        new = new_names.get(old)
        if new is None:
            is_weight = is_tensor(value) and not old.endswith("n_averaged")  # a wrapper's counter
            others = left_out if is_weight else dropped
            others.append(old.partition(".")[0] + (".*" if "." in old else ""))
        elif isinstance(value, Tensor):
            tensors[new] = value
        elif is_odd_tensor(value):
            raise CheckpointError(f"{old} is not a dense tensor ({value.name}); make it one first")
        elif holds_tensors(value, seen) and not old.endswith("_extra_state"):
            inside = places_of(value, (*chosen.place, old)).items()
            option = next(filter(None, (key_for(*place) for place in inside)), "")
            hint = f"; {option} takes those" if option else ""
            raise CheckpointError(f"{chosen.key} holds tensors, and {old} in it others{hint}")
        else:
            dropped.append(f"{old} (not a tensor)")
    if not tensors:
        raise CheckpointError("what would be taken holds no tensor; --prefix and --key choose")
    return tensors, list(dict.fromkeys(left_out)), list(dict.fromkeys(dropped))


def load(
    source: str | Path,
    *,
    key: str | None = None,
    prefix: str = "auto",
    ema: bool = True,
    keep_module: bool = False,
) -> dict[str, "torch.Tensor"]:
    """Read the weights of a checkpoint as a plain state_dict of CPU tensors, and write nothing.

    Nothing in the file is executed. Memory is taken once for the weights.

    Args:
        source: as of ``convert``, and so are the other arguments.
        key: the entry of the file to take.
        prefix: the submodule that is the network.
        ema: prefer averaged weights where there are some.
        keep_module: a child of the network is called ``module``.

    Raises:
        UserError: there is no such file.
        CheckpointError: it cannot be read.
    """
    with opened(source, key=key, prefix=prefix, ema=ema, keep_module=keep_module) as weights:
        views = {tensor.view: tensor.num_bytes for tensor in weights.tensors.values()}
        if sum(views.values()) > weights.checkpoint.max_result:
            raise CheckpointError(
                f"{sum(views.values()) / 1e9:,.1f} GB would be made of it, which its size does not "
                "explain (expanded views?)"
            )
        return weights.read(weights.tensors)
