"""Save in a checkpoint the Python attributes that training has changed, and restore them.

In: the values that ``tracked_values`` finds. Out: a dict of those that have changed since the run
began. An unchanged value is left out, so that a command that resumes the run can set another. If
ranks differ, the dict has the values of each rank. Only plain values are saved (see ``packing``),
and a warning names the others. Next: ``safe_point`` writes the dict, and restores it on resume.
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
from harness.distributed.gather import gather
from harness.kinds import SCALARS

log = logging.getLogger(__name__)

NOT_SAVED = (
    "Checkpoints lack %s. A resumed run starts with the initial values.\nKeep these values as "
    "numbers, text, lists, dicts, arrays, a buffer or a torchmetric. Ignore this warning if "
    "on_load_checkpoint, or load_state_dict of a callback, restores them."
)
OTHER_STRUCTURE = (
    "Training has added, removed or replaced %s. No run can resume from checkpoints that are "
    "written from now on.\nBuild all layers in __init__ or configure_model, and all optimizers in "
    "configure_optimizers. Freeze layers that are not trained yet."
)
NOT_RESTORED = "The resumed run did not restore these values, so its results may differ: %s."
NUMERIC = (torch.Tensor, np.ndarray, np.generic)


class Attributes:
    """Find the attributes that have changed since the start, pack them, and restore them.

    Start hooks are the hooks that run before the first epoch, such as ``on_train_start``.
    """

    def __init__(self) -> None:
        self.before_hooks: dict[Name, Digest] = {}  # digests before the start hooks
        self.after_hooks: dict[Name, Digest] = {}  # digests after the start hooks
        self.ids: dict[Name, int] = {}  # ids of the values after the start hooks
        self.packed: dict[Name, Any] = {}  # packed before an epoch's hooks run again
        self.restored: dict[Name, Any] = {}  # digests of restored values
        self.structure: dict[str, Any] = {}  # ``object_structure`` at the start
        self.reported: set[str | Name] = set()  # names in earlier warnings

    def record_before_hooks(self, trainer: pl.Trainer) -> None:
        """Record digests of all values before the start hooks run."""
        _, self.before_hooks = digest_values(trainer)
        self.structure = object_structure(trainer)

    def record_after_hooks(self, trainer: pl.Trainer) -> None:
        """Record the digests again after the start hooks, and the digests of the new samplers."""
        values, self.after_hooks = digest_values(trainer)
        samplers = {n: d for n, d in self.after_hooks.items() if n[0].startswith(SAMPLER)}
        self.before_hooks |= samplers
        self.ids = {name: id(value) for name, value in values.items()}

    def pack_before_epoch(self, trainer: pl.Trainer) -> None:
        """Pack all plain values before a resume runs an epoch's hooks again."""
        packer = Packer(named=named_objects(trainer))
        found = tracked_values(trainer).items()
        packed = {name: packer.pack_attribute(value, name) for name, value in found}
        refused = {path[:2] for path, _ in packer.objects}
        self.packed = {name: node for name, node in packed.items() if name not in refused}

    def keep(self, trainer: pl.Trainer, group: Any = None) -> dict[str, Any]:
        """Return the changed attributes of all ranks; warn once of values that are not plain."""
        values, digests = digest_values(trainer)
        nodes, lost = self._pack(trainer, values, digests)
        differs_by_rank = set[Name]()
        if trainer.world_size > 1:
            packed = {name: digest(node, {}, UNLIMITED) for name, node in nodes.items()}
            ranks = gather(trainer, (packed, lost), group)
            for packed_there, lost_there in ranks:
                differs_by_rank |= {*differing_keys(ranks[0][0], packed_there)}
                lost = lost_there | lost
        self._report(trainer, lost)
        kept = {name: node for name, node in nodes.items() if name not in lost}
        numbers = [name for name, node in kept.items() if type(node) in SCALARS]
        return {
            # If one value differs, save all values of each rank: two may share an object.
            "each": gather(trainer, kept, group) if differs_by_rank else [kept],
            "apart": sorted(differs_by_rank),
            "numbers_of_hooks": [n for n in numbers if digests[n] == self.after_hooks.get(n)],
            "in_place": [name for name in kept if id(values[name]) == self.ids.get(name)],
            "lost": lost,
            "num_processes": trainer.world_size,
        }

    def _pack(
        self, trainer: pl.Trainer, values: dict[Name, Any], digests: dict[Name, Digest]
    ) -> Any:
        """Return the packed values that may have changed, and the reason for each that is lost."""
        packer, nodes = Packer(named=named_objects(trainer)), dict[Name, Any]()
        lost = {name: "deleted" for name in self.before_hooks if name not in values}
        for name, value in values.items():
            now = digests[name]
            is_of_hooks = now == self.after_hooks.get(name)  # start hooks have set it
            is_unchanged = is_of_hooks and now == self.before_hooks.get(name)
            if is_unchanged and (now.is_complete or is_data(name)):
                continue
            packer.objects = []
            node = packer.pack_attribute(value, name)
            if name[0].startswith(SAMPLER):
                lost[name] = "a checkpoint keeps only numbers of a sampler"
            elif not packer.objects:
                nodes[name] = node
            elif not is_of_hooks or now.has_tensors or not now.is_complete:
                # Start hooks would set it again, but its tensors may depend on the weights.
                lost[name] = packer.objects[0][1]
        return nodes, lost

    def _report(self, trainer: pl.Trainer, lost: dict[Name, str]) -> None:
        """Warn once of changed values and layers that checkpoints from now on lack."""
        names = differing_keys(self.structure, object_structure(trainer))
        # ``True`` stands for a tensor of any shape: see ``object_structure``.
        changed = sorted(n for n in names if self.structure.get(n) is not True)
        if trainer.is_global_zero and not self.reported.issuperset(changed):
            log.warning(OTHER_STRUCTURE, join_first(changed))
        report(
            trainer, NOT_SAVED, {n: reason for n, reason in lost.items() if n not in self.reported}
        )
        self.reported |= {*changed, *lost}

    def restore(self, trainer: pl.Trainer, saved: dict[str, Any], is_last: bool = True) -> None:
        """Restore the values that ``keep`` returned; with ``is_last``, warn of lost values."""
        each, lost = saved["each"], dict[Name, str](saved["lost"])
        has_own_values = len(each) == trainer.world_size
        kept: dict[Name, Any] = copy.deepcopy(each[trainer.global_rank if has_own_values else 0])
        for name in () if has_own_values else saved["apart"]:
            kept.pop(name, None)
            lost[name] = f"differed between {len(each)} ranks"
        values, before = digest_values(trainer)
        # In the checkpoint these values equal the start, but an epoch's hooks have run since.
        others = self.packed.keys() - kept.keys() - lost.keys()
        undone = {n: self.packed[n] for n in others if before.get(n) != self.after_hooks[n]}
        kept |= copy.deepcopy(undone)
        changed = [name for name, restored in self.restored.items() if before.get(name) != restored]
        lost |= dict.fromkeys(changed, "changes while a batch is read or moved")
        for name in self.after_hooks.keys() & {*saved["numbers_of_hooks"]} & kept.keys():
            # A hook may compute it from the number of ranks, devices or epochs of this command.
            if digest(kept[name], {}, WHOLE) != self.after_hooks[name]:
                del kept[name]
                lost[name] = "a hook at the start has set another value"
        in_place = [n for n in (*saved["in_place"], *undone) if n in kept and n in values]
        targets = {id(kept[n]): values[n] for n in in_place}
        unpacker, found = Unpacker(trainer.strategy.root_device, targets), tracked_objects(trainer)
        for name, node in kept.items():
            try:
                set_value(trainer.lightning_module, found, name, unpacker.unpack(node))
            except Exception as error:  # the object does not exist, or refuses the value
                lost[name] = f"{type(error).__name__}: {error}"
        _, digests = digest_values(trainer)
        self.restored = {name: digests[name] for name in kept if name in digests}
        if saved["num_processes"] != trainer.world_size:
            no_counts = {n for n, node in kept.items() if type(node) in (type(None), bool, str)}
            no_counts |= {name for name in kept if name[0] == GRADIENT}
            counts = sorted(kept.keys() - {*no_counts, *lost, *undone, *saved["numbers_of_hooks"]})
            lost |= dict.fromkeys(counts, "may depend on the number of ranks, which has changed")
        if is_last:
            report(trainer, NOT_RESTORED, lost)
            self.packed = {}


def restore_numbers(module: pl.LightningModule, saved: dict[str, Any], device: Any) -> None:
    """Restore the numbers, texts, arrays and tensors that training changed in a module.

    An evaluation computes with these values, as it does with weights. Lists and dicts stay
    unchanged, because a module collects its own values in them.

    Args:
        module: a module with the weights of the same checkpoint.
        saved: the dict that ``keep`` returned. Rank 0's values are restored.
        device: the device for tensors that were not on the CPU.
    """
    found = with_contained_objects({**submodules_of(module), "module hparams": module.hparams})
    unpacker = Unpacker(device)
    # Pruning replaces parameters by tensors during the training, and restores them at its end.
    weights = {f"module.{name}" for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, node in saved["each"][0].items():
        value = unpacker.unpack(node)
        is_number = type(value) in SCALARS or isinstance(value, NUMERIC)
        if is_number and name[0] in found and ".".join(name) not in weights:
            with suppress(KeyError):  # only a file of another program has such a name
                set_value(module, found, name, value)


def digest_values(trainer: pl.Trainer) -> tuple[dict[Name, Any], dict[Name, Digest]]:
    """Return all ``tracked_values``, and their digests."""
    values, named = tracked_values(trainer), named_objects(trainer)
    return values, {
        name: digest(value, named, SAMPLED if is_data(name) else WHOLE)
        for name, value in values.items()
    }


def is_data(name: Name) -> bool:
    """Return whether an attribute belongs to the data module or a sampler."""
    return name[0].startswith(("data", SAMPLER))


def differing_keys(a: dict[Any, Any], b: dict[Any, Any]) -> list[Any]:
    """Return the keys whose values differ between two dicts, or that only one of them has."""
    return [key for key in a.keys() | b.keys() if a.get(key, b) != b.get(key, a)]


def report(trainer: pl.Trainer, message: str, reasons: dict[Name, str]) -> None:
    """Log a warning on rank 0 that lists attributes, each with its reason."""
    texts = [f"{label}.{name} ({reason})" for (label, name), reason in reasons.items()]
    if texts and trainer.is_global_zero:
        log.warning(message, join_first(texts))
