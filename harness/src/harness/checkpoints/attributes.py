"""Keeps the Python attributes that training has changed, with a checkpoint.

In: the values that ``tracked_objects`` finds. Kept are those that differ from how they were when
the run began, so that settings of a new command stay, and that are plain (see ``plain``); where
processes differ in one of them, those of each. Any other that has changed is named once. Next:
``safe_point`` writes them, and has them put back on resume.
"""

import copy
import logging
from contextlib import suppress
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from harness.checkpoints.digests import SAMPLED, UNLIMITED, WHOLE, Digest, digest
from harness.checkpoints.packing import Packer, Unpacker
from harness.checkpoints.tracked_attributes import (
    GRADIENT,
    SAMPLER,
    Name,
    named_objects,
    object_structure,
    set_value,
    submodules_of,
    tracked_objects,
    tracked_values,
    with_contained_objects,
)
from harness.display import join_first
from harness.distributed.vote import gather
from harness.kinds import SCALARS

log = logging.getLogger(__name__)

LACKS = (
    "Checkpoints lack %s: a run that goes on from one begins anew with it.\nKeep it as numbers, "
    "text, lists, dicts, arrays, a buffer or a torchmetric, unless your on_load_checkpoint (of a "
    "callback: load_state_dict) reads it."
)
OTHER_STRUCTURE = (
    "Training has added, removed or exchanged %s: no run can go on from checkpoints that are "
    "written from here on.\nBuild all layers in __init__ or configure_model, all optimizers in "
    "configure_optimizers, and freeze what is not trained yet."
)
OTHERS = "These are not as they were, and what depends on them may differ: %s."
NUMERIC = (torch.Tensor, np.ndarray, np.generic)


class Attributes:
    """Compares attributes with those of the start, keeps what differs, and puts it back."""

    def __init__(self) -> None:
        self.before_hooks: dict[Name, Digest] = {}  # digests before the hooks at the start
        self.after_hooks: dict[Name, Digest] = {}
        self.ids: dict[Name, int] = {}  # of the objects after these hooks
        self.packed: dict[Name, Any] = {}  # before an epoch's hooks are called again
        self.placed: dict[Name, Any] = {}  # digests of what was put back
        self.structure: dict[str, Any] = {}  # of the start
        self.reported: set[str | Name] = set()

    def look_before_hooks(self, trainer: pl.Trainer) -> None:
        """Record digests of all values before the hooks at the start run."""
        _, self.before_hooks = look(trainer)
        self.structure = object_structure(trainer)

    def look_after_hooks(self, trainer: pl.Trainer) -> None:
        """Record them again after these hooks; samplers were not there before."""
        alive, self.after_hooks = look(trainer)
        samplers = {n: one for n, one in self.after_hooks.items() if n[0].startswith(SAMPLER)}
        self.before_hooks |= samplers
        self.ids = {name: id(value) for name, value in alive.items()}

    def look_before_epoch(self, trainer: pl.Trainer) -> None:
        """Keep all plain values before an epoch's hooks are called again."""
        packer = Packer(named=named_objects(trainer))
        found = tracked_values(trainer).items()
        packed = {name: packer.pack_attribute(value, name) for name, value in found}
        refused = {place[:2] for place, _ in packer.objects}
        self.packed = {name: node for name, node in packed.items() if name not in refused}

    def keep(self, trainer: pl.Trainer, group: Any = None) -> dict[str, Any]:
        """Return all processes' attributes for a checkpoint; warn once of those it cannot keep."""
        alive, now = look(trainer)
        nodes, lost = self._pack(trainer, alive, now)
        apart = set[Name]()
        if trainer.world_size > 1:
            packed = {name: digest(node, {}, UNLIMITED) for name, node in nodes.items()}
            everyone = gather(trainer, (packed, lost), group)
            for theirs, lost_there in everyone:
                apart |= {*differing(everyone[0][0], theirs)}
                lost = lost_there | lost
        self._report(trainer, lost)
        kept = {name: node for name, node in nodes.items() if name not in lost}
        numbers = [name for name, node in kept.items() if type(node) in SCALARS]
        return {
            # All of each process's, for one that differs may hold a part of one that does not.
            "each": gather(trainer, kept, group) if apart else [kept],
            "apart": sorted(apart),
            "numbers_of_hooks": [n for n in numbers if now[n] == self.after_hooks.get(n)],
            "in_place": [name for name in kept if id(alive[name]) == self.ids.get(name)],
            "lost": lost,
            "num_processes": trainer.world_size,
        }

    def _pack(self, trainer: pl.Trainer, alive: dict[Name, Any], now: dict[Name, Digest]) -> Any:
        """Pack what has changed since the start, and say of the rest why it is lost."""
        packer, nodes = Packer(named=named_objects(trainer)), dict[Name, Any]()
        lost = {name: "deleted" for name in self.before_hooks if name not in alive}
        for name, value in alive.items():
            is_of_hooks = now[name] == self.after_hooks.get(name)
            is_unchanged = is_of_hooks and now[name] == self.before_hooks.get(name)
            if is_unchanged and (now[name].is_complete or is_data(name)):
                continue
            packer.objects = []
            node = packer.pack_attribute(value, name)
            if name[0].startswith(SAMPLER):
                lost[name] = "of a sampler only numbers are kept"
            elif not packer.objects:
                nodes[name] = node
            elif not is_of_hooks or now[name].has_tensors or not now[name].is_complete:
                # Hooks at the start make it again, unless it has tensors, perhaps of the weights.
                lost[name] = packer.objects[0][1]
        return nodes, lost

    def _report(self, trainer: pl.Trainer, lost: dict[Name, str]) -> None:
        """Warn once of what no checkpoint holds from here on."""
        others = differing(self.structure, object_structure(trainer))
        changed = sorted(n for n in others if self.structure.get(n) is not True)  # see structure
        if trainer.is_global_zero and not self.reported.issuperset(changed):
            log.warning(OTHER_STRUCTURE, join_first(changed))
        report(trainer, LACKS, {n: why for n, why in lost.items() if n not in self.reported})
        self.reported |= {*changed, *lost}

    def restore(self, trainer: pl.Trainer, saved: dict[str, Any], is_last: bool = True) -> None:
        """Put back what ``keep`` has kept; with `is_last` report what is lost."""
        each, lost = saved["each"], dict[Name, str](saved["lost"])
        is_for_each = len(each) == trainer.world_size
        kept: dict[Name, Any] = copy.deepcopy(each[trainer.global_rank if is_for_each else 0])
        for name in () if is_for_each else saved["apart"]:
            kept.pop(name, None)
            lost[name] = f"differed between {len(each)} processes"
        alive, before = look(trainer)
        # A step had undone what an epoch's hooks set, and have set again.
        others = self.packed.keys() - kept.keys() - lost.keys()
        undone = {n: self.packed[n] for n in others if before.get(n) != self.after_hooks[n]}
        kept |= copy.deepcopy(undone)
        moved = [name for name, placed in self.placed.items() if before.get(name) != placed]
        lost |= dict.fromkeys(moved, "changes while a batch is read or moved")
        for name in self.after_hooks.keys() & {*saved["numbers_of_hooks"]} & kept.keys():
            # Hooks may compute it of processes, devices or epochs, which are others now.
            if digest(kept[name], {}, WHOLE) != self.after_hooks[name]:
                del kept[name]
                lost[name] = "a hook at the start has set another value"
        in_place = [n for n in (*saved["in_place"], *undone) if n in kept and n in alive]
        targets = {id(kept[n]): alive[n] for n in in_place}
        unpacker, found = Unpacker(trainer.strategy.root_device, targets), tracked_objects(trainer)
        for name, node in kept.items():
            try:
                set_value(trainer.lightning_module, found, name, unpacker.unpack(node))
            except Exception as error:  # its owner is not there, or refuses it
                lost[name] = f"{type(error).__name__}: {error}"
        _, now = look(trainer)
        self.placed = {name: now[name] for name in kept if name in now}
        if saved["num_processes"] != trainer.world_size:
            no_sums = {n for n, node in kept.items() if type(node) in (type(None), bool, str)}
            no_sums |= {name for name in kept if name[0] == GRADIENT}
            counts = sorted(kept.keys() - {*no_sums, *lost, *undone, *saved["numbers_of_hooks"]})
            lost |= dict.fromkeys(counts, "equal in all processes, of which there were others")
        if is_last:
            report(trainer, OTHERS, lost)
            self.packed = {}


def restore_numbers(module: pl.LightningModule, saved: dict[str, Any], device: Any) -> None:
    """Give a module the numbers, texts, arrays and tensors that training had changed in it.

    An evaluation computes with them as with weights. Lists and dicts, in which a module collects
    what it sees, stay as they are.

    Args:
        module: has the weights of the same checkpoint.
        saved: what ``keep`` has kept; of several processes the first one's is taken.
        device: of the tensors that were not on the CPU.
    """
    found = with_contained_objects({**submodules_of(module), "module hparams": module.hparams})
    unpacker = Unpacker(device)
    # Pruning makes a tensor of a parameter, and at the end of training a parameter of the tensor.
    weights = {f"module.{name}" for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, node in saved["each"][0].items():
        value = unpacker.unpack(node)
        is_number = type(value) in SCALARS or isinstance(value, NUMERIC)
        if is_number and name[0] in found and ".".join(name) not in weights:
            with suppress(KeyError):  # a name that no run of ours gives
                set_value(module, found, name, value)


def look(trainer: pl.Trainer) -> tuple[dict[Name, Any], dict[Name, Digest]]:
    """Return all ``tracked_values``, and the digest of each."""
    alive, named = tracked_values(trainer), named_objects(trainer)
    return alive, {
        name: digest(value, named, SAMPLED if is_data(name) else WHOLE)
        for name, value in alive.items()
    }


def is_data(name: Name) -> bool:
    """Return whether an attribute is of the data module or of a sampler."""
    return name[0].startswith(("data", SAMPLER))


def differing(one: dict[Any, Any], other: dict[Any, Any]) -> list[Any]:
    """Return the keys whose values differ between two dicts, or that only one of them has."""
    return [n for n in one.keys() | other.keys() if one.get(n, other) != other.get(n, one)]


def report(trainer: pl.Trainer, sentence: str, attributes: dict[Name, str]) -> None:
    """Warn of attributes, each with a reason."""
    texts = [f"{owner}.{name} ({why})" for (owner, name), why in attributes.items()]
    if texts and trainer.is_global_zero:
        log.warning(sentence, join_first(texts))
