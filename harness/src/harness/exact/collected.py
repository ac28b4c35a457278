"""Lists that a module collects while it is evaluated, in every process what one would have."""

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytorch_lightning as pl
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from harness.processes.agreement import gather

Path = tuple[str, Any]  # an attribute, and the key in it where it is a dict of lists
Part = tuple[tuple[int, int], list[Any]]  # loader and batch; what the batch has added
NOT_OWN = set(vars(pl.LightningModule()))


class OnDevice(NamedTuple):
    """A tensor that goes back to the module's device."""

    tensor: Tensor


class CollectedLists:
    """Gather what ``validation_step`` appends to lists of the module, in the order of one process.

    Lightning's own way to look at all outputs of an evaluation is a list that the steps fill and
    ``on_validation_epoch_end`` reads: it would be that of one process's samples. Lists in
    attributes of the module, and in dicts there, are gathered before that hook; what was in them
    before the evaluation stays.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.places: list[tuple[int, int]] = []  # loader and batch, of each step
        self.lengths: list[dict[Path, int]] = []  # before each step
        self.counts: dict[str, Any] = {}  # numbers of the module, before the first batch

    def begin_batch(self, batch_idx: int, dataloader_idx: int) -> None:
        """Note what the batches before have added."""
        if not self.places:
            self.counts = numbers_of(self.module)
        self.places.append((dataloader_idx, batch_idx))
        self.lengths.append({path: len(values) for path, values in lists_of(self.module)})

    def counted(self) -> dict[str, Any]:
        """The numbers of the module that the steps have changed."""
        now = numbers_of(self.module)
        return {k: now[k] for k, v in self.counts.items() if k in now and str(now[k]) != str(v)}

    def gather(self, trainer: pl.Trainer, group: Any) -> bool:
        """Fill the lists with what all processes have collected; whether there was anything."""
        found = dict(lists_of(self.module))
        packed = {path: self._packed(path, values) for path, values in found.items()}
        mine = {path: parts for path, parts in packed.items() if parts != b""}
        everyone = gather(trainer, mine, group)
        named = dict.fromkeys(path for one in everyone for path in one)
        # An author may clear a list within the evaluation, or keep what cannot leave a process.
        paths = [
            p for p in named if p in found and all(one.get(p, b"") is not None for one in everyone)
        ]
        for path in paths:
            by_rank = [pickle.loads(one[path]) for one in everyone if path in one]
            parts: list[Part] = [part for of_one in by_rank for part in of_one]
            parts.sort(key=lambda part: part[0])  # by loader and turn; by rank in each
            merged = [element for _, elements in parts for element in elements]
            start = self.lengths[0].get(path, 0)
            found[path][start:] = apply_to_collection(merged, OnDevice, self._back)
        return bool(paths)

    def _packed(self, path: Path, values: list[Any]) -> bytes | None:
        """What the steps have added; ``None`` where a list was cleared or cannot be sent."""
        marks = [lengths.get(path, 0) for lengths in self.lengths] + [len(values)]
        added = zip(self.places, marks, marks[1:], strict=False)
        parts = [(place, values[low:high]) for place, low, high in added if low < high]
        if marks != sorted(marks):
            return None
        try:
            return pickle.dumps(apply_to_collection(parts, Tensor, _movable)) if parts else b""
        except (pickle.PicklingError, AttributeError, TypeError):
            return None

    def _back(self, moved: OnDevice) -> Tensor:
        return moved.tensor.to(self.module.device)


def lists_of(module: pl.LightningModule) -> Iterator[tuple[Path, list[Any]]]:
    """The lists that are attributes of a module, and those in dicts that are."""
    for name, value in vars(module).items():
        if name in NOT_OWN:
            continue
        if type(value) is list:
            yield (name, None), value
        elif isinstance(value, dict):
            yield from (((name, key), item) for key, item in value.items() if type(item) is list)


def numbers_of(module: pl.LightningModule) -> dict[str, Any]:
    """Copies of a module's attributes that are numbers, tensors or buffers."""
    own = {name: value for name, value in vars(module).items() if name not in NOT_OWN}
    own |= dict(module.named_buffers(recurse=False))
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in own.items()
        if isinstance(value, (bool, int, float, Tensor))
    }


def _movable(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    # A view would take its whole storage with it.
    return tensor.clone() if tensor.device.type == "cpu" else OnDevice(tensor.cpu())
