"""Keeps the Python attributes that training has changed, with a checkpoint.

In: the values that ``owners`` finds. Kept are those that differ from how they were when the run
began, so that settings of a new command stay, and that are plain (see ``plain``). Any other that
has changed is named once. Next: ``safe_point`` writes them, and has them put back on resume.
"""

import copy
import logging
import math
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from harness.checkpoints.owners import (
    FLAG,
    GRADIENT,
    SAMPLER,
    Name,
    is_loaded_by_author,
    named_objects,
    set_value,
    structure,
    values,
)
from harness.checkpoints.plain import SCALARS, Packer, Unpacker, digest
from harness.names import few
from harness.processes.agreement import gather

log = logging.getLogger(__name__)

LARGEST_MEGABYTES = 256  # of one tensor or array, in every process
LACKS = (
    "Checkpoints lack %s: a run that goes on from one begins anew with it.\nKeep it as numbers, "
    "text, lists, dicts, arrays, a buffer or a torchmetric, or write it in on_save_checkpoint and "
    "read it in on_load_checkpoint (of a callback: state_dict and load_state_dict)."
)

OTHER_STRUCTURE = (
    "Training has added, removed or exchanged %s: no run can go on from checkpoints that are "
    "written from here on.\nBuild all layers in __init__ or configure_model, all optimizers in "
    "configure_optimizers, and freeze what is not trained yet."
)


class AttributePacker(Packer):
    """Packs attributes, whose tensors become copies on the CPU.

    Args:
        named: names of parameters and others that a checkpoint holds in another place, by id.
    """

    def __init__(self, named: dict[int, str]) -> None:
        super().__init__()
        self.named = named
        self.reached_by: dict[int, Name] = {}
        self.shared: set[Name] = set()  # attributes of which another one holds a part

    def pack(self, value: Any, place: tuple[Any, ...] = ()) -> Any:
        """See ``Packer``."""
        name = place[:2]
        is_array = isinstance(value, (torch.Tensor, np.ndarray))
        num_bytes = math.prod(value.shape) * value.itemsize if is_array else 0
        if num_bytes > LARGEST_MEGABYTES * 2**20 and name[0] != GRADIENT:
            return self.refuse(value, place, f"more than {LARGEST_MEGABYTES} MB")
        if id(value) in self.nodes and (first := self.reached_by[id(value)]) != name:
            self.shared |= {first, name}
        self.reached_by.setdefault(id(value), name)
        return super().pack(value, place)

    def tensor(self, value: torch.Tensor, place: tuple[Any, ...]) -> Any:
        """Copy a tensor to the CPU; of one with a graph its values."""
        if id(value) in self.named:
            return self.refuse(value, place, f"it is {self.named[id(value)]}")
        if value.is_meta or (value.requires_grad and value.is_leaf):
            return self.refuse(value, place, "a tensor without values, or trained, no parameter")
        data = value.detach().to("cpu", copy=True)
        return data if value.device.type == "cpu" else self.marked(torch.Tensor, data)


class Attributes:
    """Compares attributes with those of the start, keeps what differs, and puts it back."""

    def __init__(self) -> None:
        self.first: dict[Name, Any] = {}  # digests before the hooks at the start
        self.started: dict[Name, Any] = {}  # digests after them
        self.ids: dict[Name, int] = {}  # and the objects
        self.placed: dict[Name, Any] = {}  # digests of what was put back
        self.structure: dict[str, Any] = {}  # of the start
        self.reported: set[str | Name] = set()

    def begin(self, trainer: pl.Trainer) -> None:
        """Look at all values before the hooks at the start."""
        self.first, self.structure = digests(trainer), structure(trainer)

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Look at them after these hooks."""
        self.started = digests(trainer)
        self.first |= {n: one for n, one in self.started.items() if n[0].startswith(SAMPLER)}
        self.ids = {name: id(value) for name, value in values(trainer).items()}

    def keep(self, trainer: pl.Trainer, group: Any = None) -> dict[str, Any]:
        """What a checkpoint holds of all processes; what it does not is named once."""
        alive, now = values(trainer), digests(trainer)
        packer = AttributePacker(named_objects(trainer))
        nodes: dict[Name, Any] = {}
        lost = {name: "deleted" for name in self.first if name not in alive}
        for name in (name for name in alive if now[name] != self.first.get(name)):
            packer.objects = []
            node = packer.pack(alive[name], name)
            if name[0].startswith(SAMPLER):
                lost[name] = "of a sampler only numbers are kept"
            elif not packer.objects:
                nodes[name] = node
            elif now[name] != self.started.get(name) or now[name][1]:
                # Hooks at the start make it again, unless it has tensors, perhaps of the weights.
                lost[name] = packer.objects[0][1]
        common, each = nodes, [dict[Name, Any]()]
        if trainer.world_size > 1:
            everyone = gather(trainer, ({n: now[n] for n in nodes}, lost, packer.shared), group)
            lost = {name: why for _, of_one, _ in everyone for name, why in of_one.items()}
            apart = {n for theirs, _, _ in everyone for n in differing(everyone[0][0], theirs)}
            shared = {name for _, _, of_one in everyone for name in of_one}
            apart |= shared if shared & apart else set()  # what is shared stays in one pack
            common = {name: node for name, node in nodes.items() if name not in apart}
            each = gather(trainer, {n: nodes[n] for n in nodes if n in apart}, group)
        self._report_structure(trainer)
        new = {name: why for name, why in lost.items() if name not in self.reported}
        self.reported |= new.keys()
        report(trainer, LACKS, new)
        return {
            "settings": settings(trainer),
            "common": common,
            "each": each,
            "of_start": [name for name in nodes if now[name] == self.started.get(name)],
            "in_place": [name for name in nodes if id(alive[name]) == self.ids.get(name)],
            "lost": lost,
        }

    def _report_structure(self, trainer: pl.Trainer) -> None:
        """Name once what a run that goes on from here would not build again."""
        others = differing(self.structure, structure(trainer))
        changed = sorted(n for n in others if self.structure.get(n) is not True)  # see structure
        if trainer.is_global_zero and not self.reported.issuperset(changed):
            log.warning(OTHER_STRUCTURE, few(changed))
        self.reported |= {*changed}

    def put_back(self, trainer: pl.Trainer, saved: dict[str, Any], is_last: bool = True) -> None:
        """Put back what ``keep`` has kept; with `is_last` report what is lost."""
        each, lost, mine = saved["each"], dict(saved["lost"]), dict[Name, Any]()
        if len(each) == trainer.world_size:
            mine = each[trainer.global_rank]
        else:
            names = {name for one in each for name in one}
            lost |= dict.fromkeys(names, f"differed between {len(each)} processes")
        nodes: dict[Name, Any] = copy.deepcopy({**saved["common"], **mine})
        before, alive = digests(trainer), values(trainer)
        moved = [n for n, placed in self.placed.items() if before.get(n) != placed]
        lost |= dict.fromkeys(moved, "changes while a batch is read or moved")
        # Hooks at the start may have computed numbers from the processes, devices or epochs.
        numbers = [n for n in saved["of_start"] if type(nodes.get(n, [])) in SCALARS]
        for name in numbers if saved["settings"] != settings(trainer) else ():
            if name[0] != FLAG and nodes.pop(name) != alive.get(name):
                lost[name] = "a hook at the start has set another value"
        targets = {id(nodes[n]): alive[n] for n in saved["in_place"] if n in nodes and n in alive}
        unpacker = Unpacker(trainer.strategy.root_device, targets)
        for name, node in nodes.items():
            try:
                set_value(trainer, name, unpacker.unpack(node))
            except Exception as error:  # its owner is not there, or refuses it
                lost[name] = f"{type(error).__name__}: {error}"
        now = digests(trainer)
        self.placed = {name: now[name] for name in nodes if name in now}
        self.started |= {name: now[name] for name in saved["of_start"] if name in now}
        if is_last:
            sentence = "These are not as they were, and what depends on them will differ: %s."
            report(trainer, sentence, lost)
        if is_last and len(each) != trainer.world_size:
            sentence = (
                f"The run had {len(each)} processes and has {trainer.world_size} now. Each goes on "
                "with these, so that counts of a process's own samples have another sum: %s."
            )
            kinds = {n: type(node) for n, node in saved["common"].items() if n[0] != GRADIENT}
            sums = [n for n, kind in kinds.items() if kind not in (type(None), bool, str)]
            others = {*saved["of_start"], *lost}
            report(trainer, sentence, {n: "equal in all" for n in sums if n not in others})


def digests(trainer: pl.Trainer) -> dict[Name, Any]:
    """The digest of each value."""
    named = named_objects(trainer)
    return {name: digest(value, named) for name, value in values(trainer).items()}


def differing(one: dict[Any, Any], other: dict[Any, Any]) -> list[Any]:
    """The names under which two dicts hold unequal values, or only one of them a value."""
    return [n for n in one.keys() | other.keys() if one.get(n, other) != other.get(n, one)]


def settings(trainer: pl.Trainer) -> list[int]:
    """What hooks at the start may have computed values from."""
    num_devices = trainer.num_devices * trainer.num_nodes
    planned = int(min(trainer.estimated_stepping_batches, 2**62))
    return [trainer.world_size, num_devices, int(trainer.accumulate_grad_batches), planned]


def report(trainer: pl.Trainer, sentence: str, lost: dict[Name, str]) -> None:
    """Warn of attributes that are lost, but for those that the author's own code loads."""
    named = {name: why for name, why in lost.items() if not is_loaded_by_author(trainer, name)}
    texts = [f"{owner}.{name} ({why})" for (owner, name), why in named.items()]
    if texts and trainer.is_global_zero:
        log.warning(sentence, few(texts))
