"""Lists that a module collects while it is evaluated, in every process what one would have."""

import pickle
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from harness.processes.agreement import gather

Path = tuple[str, Any]  # an attribute, and the key in it where it is a dict of lists
NOT_OWN = set(vars(pl.LightningModule()))


class OnDevice(NamedTuple):
    """A tensor that goes back to the module's device."""

    tensor: Tensor


class CollectedLists:
    """Gather what ``validation_step`` appends to lists of the module, in the order of one process.

    Lightning's own way to look at all outputs of an evaluation is a list that the steps fill and
    ``on_validation_epoch_end`` reads: it would be that of one process's samples. Lists in
    attributes of the module, and in dicts there, are gathered before that hook; what was in them
    before the evaluation stays. A module that calls ``torch.distributed`` there gathers itself, and
    its lists stay as they are.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.starts: dict[Path, int] = {}  # lengths at the first batch
        self.lengths: dict[Path, int] = {}
        self.steps: dict[Path, list[int]] = {}  # elements that each batch has added
        self.cleared: set[Path] = set()
        self.num_steps = 0
        self.is_filler = False  # the batch that runs
        self.counts: dict[str, Any] = {}  # numbers of the module, before the first batch
        self.before_filler: dict[str, Any] = {}

    def begin_batch(self, is_filler: bool) -> None:
        """Before a batch: see what the one before has added; forget what a filler has."""
        found = dict(lists_of(self.module))
        if self.num_steps == 0:
            self.counts = numbers_of(self.module)
            self.starts = {path: len(values) for path, values in found.items()}
        else:
            self._count(found)
        self.lengths = {path: len(values) for path, values in found.items()}
        self.num_steps += 1
        self.is_filler = is_filler
        if is_filler:
            self.before_filler = numbers_of(self.module)

    def end_filler(self) -> None:
        """After a filler: forget what it has added to lists and numbers of the module."""
        self._count(dict(lists_of(self.module)))
        for name, value in self.before_filler.items():
            setattr(self.module, name, value)

    def counted(self) -> dict[str, Any]:
        """The numbers of the module that the steps have changed."""
        now = numbers_of(self.module)
        return {k: now[k] for k, v in self.counts.items() if k in now and str(now[k]) != str(v)}

    def _count(self, found: dict[Path, list[Any]]) -> None:
        for path, values in found.items():
            before = self.lengths.get(path, 0)
            if len(values) < before:
                self.cleared.add(path)
            elif self.is_filler:
                del values[before:]
            elif len(values) > before:
                steps = self.steps.setdefault(path, [])
                steps += [0] * (self.num_steps - 1 - len(steps)) + [len(values) - before]

    def gather(self, trainer: pl.Trainer, group: Any) -> bool:
        """Fill the lists with what all processes have collected; whether there was anything."""
        found = dict(lists_of(self.module))
        self._count(found)
        mine: dict[Path, bytes | None] = dict.fromkeys(self.cleared)
        for path, steps in self.steps.items():
            if path in found and path not in self.cleared:
                mine[path] = _packed(found[path][self.starts.get(path, 0) :], steps)
        everyone = gather(trainer, mine, group)
        is_any = False
        for path in dict.fromkeys(path for one in everyone for path in one):
            packed = [one[path] for one in everyone if path in one]
            if None in packed or path not in found:
                continue
            by_process: list[list[list[Any]]] = [pickle.loads(one) for one in packed]
            num_steps = max(map(len, by_process))
            merged = [
                element
                for step in range(num_steps)
                for steps_of_one in by_process
                for element in (steps_of_one[step] if step < len(steps_of_one) else ())
            ]
            merged = apply_to_collection(merged, OnDevice, self._back)
            found[path][self.starts.get(path, 0) :] = merged
            is_any = True
        return is_any

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
    """Copies of a module's attributes that are numbers, tensors, buffers, or dicts of them."""
    own = {name: value for name, value in vars(module).items() if name not in NOT_OWN}
    own |= dict(module.named_buffers(recurse=False))
    kinds = (bool, int, float, Tensor)
    return {
        name: apply_to_collection(value, Tensor, Tensor.clone)
        for name, value in own.items()
        if isinstance(value, kinds)
        or (type(value) is dict and all(isinstance(item, kinds) for item in value.values()))
    }


def gathers_itself(module: pl.LightningModule, hook: str) -> bool:
    """Whether a hook, or a method that it calls, uses ``torch.distributed``."""
    names, seen = [hook], set()
    for name in names:
        function = getattr(getattr(type(module), name, None), "__func__", None)
        function = function or getattr(type(module), name, None)
        if name in seen or not isinstance(function, FunctionType):
            continue
        seen.add(name)
        if function.__module__.startswith("pytorch_lightning."):
            continue
        used = _names_in(function.__code__)
        known = [function.__globals__.get(one) for one in used]
        if "distributed" in used or any(_is_distributed(one) for one in known):
            return True
        names += used
    return False


def _names_in(code: Any) -> list[str]:
    inner = [one for one in code.co_consts if isinstance(one, type(code))]
    return [*code.co_names, *(name for one in inner for name in _names_in(one))]


def _is_distributed(value: Any) -> bool:
    if value is dist or value is sys.modules.get("torch.distributed.nn.functional"):
        return True
    return str(getattr(value, "__module__", "")).startswith("torch.distributed")


def _packed(elements: list[Any], steps: list[int]) -> bytes | None:
    """The elements by step; ``None`` if they cannot leave the process."""
    by_step: list[list[Any]] = []
    for size in steps:
        by_step.append(elements[:size])
        elements = elements[size:]
    try:
        return pickle.dumps(apply_to_collection(by_step, Tensor, _movable))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _movable(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    # A view would take its whole storage with it.
    return tensor.clone() if tensor.device.type == "cpu" else OnDevice(tensor.cpu())
