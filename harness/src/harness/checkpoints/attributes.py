"""What Python objects of a run hold that no state_dict does, so that a run goes on with it."""

from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from harness.checkpoints.belongings import inherited
from harness.checkpoints.fingerprints import fingerprint, rough_print
from harness.checkpoints.owners import (
    BUFFERS,
    FLAGS,
    MODULE,
    Name,
    is_handled,
    known_objects,
    owners,
    values,
    warn_of,
)
from harness.checkpoints.packing import CONTAINERS, SCALARS, Packer, UnkeptError
from harness.checkpoints.placing import MISSING, LostError, Placer
from harness.processes.agreement import gather

# What is not kept alive for its id: nobody would see that another object has got it.
LARGE = (*CONTAINERS, torch.Tensor, np.ndarray, torch.nn.Module)


class Attributes:
    """Keeps the attributes of the module, the data module and the author's callbacks.

    Kept is what differs from how it was when the run began, in every checkpoint from the one on
    that finds it changed. Lightning and torch keep their own.

    Args:
        megabytes: of one process that a checkpoint takes at most.
    """

    def __init__(self, megabytes: float) -> None:
        self.most_bytes = megabytes * 2**20
        self.fresh: dict[Name, Any] = {}  # fingerprints when the run began
        self.started: dict[Name, Any] = {}  # of what the hooks at the start have changed
        self.first: dict[int, Any] = {}  # by id: the objects that were there then, or None
        self.changed: set[Name] = set()
        self.told: set[Name] = set()
        self.placed: dict[Name, Any] = {}  # fingerprints of what a checkpoint held

    def begin(self, trainer: pl.Trainer) -> None:
        """Know how everything was before the hooks at the start."""
        packer = self._comparing(trainer)
        self.fresh = {name: self._print(packer, v) for name, v in values(trainer).items()}

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Know how it was after them."""
        packer = self._comparing(trainer)
        self.first, self.started = {}, {}
        for name, value in values(trainer).items():
            now = self._print(packer, value)
            for one in (value, *(found for found, _ in packer.packed.values())):
                self.first[id(one)] = None if isinstance(one, LARGE) else one
            if now != self.fresh.get(name):
                self.started[name] = now
        self.changed |= self.started.keys()

    def keep(self, trainer: pl.Trainer, group: Any = None) -> dict[str, Any]:
        """What a checkpoint holds of all processes; what it does not is told once."""
        packed: dict[Name, Any] = {}
        left: dict[Name, str] = {}
        comparing, alive = self._comparing(trainer), values(trainer)
        packer = Packer(comparing.known, self.first, self.most_bytes)
        now = {
            name: self._print(comparing, value)
            for name, value in alive.items()
            if name not in self.changed or name in self.started
        }
        self.changed |= {n for n, found in now.items() if found != self.fresh.get(n)}
        as_started = {n for n, found in self.started.items() if now.get(n, MISSING) == found}
        self.started = {name: self.started[name] for name in as_started}
        for name in dict.fromkeys((*self.fresh, *alive)):
            if name in alive and name not in self.changed:
                continue
            try:
                packed[name] = packer.pack(alive[name]) if name in alive else {"#": "deleted"}
            except UnkeptError as reason:
                if name not in as_started:
                    left[name] = str(reason)
        is_alone = trainer.world_size == 1
        mine = {n: None if is_alone else fingerprint(node) for n, node in packed.items()}
        prints = gather(trainer, (mine, left), group)
        equal = {n for n in mine if all(n in other and other[n] == mine[n] for other, _ in prints)}
        left = {name: why for _, lacks in prints for name, why in lacks.items()}
        self._tell_left(trainer, left)
        differing = {name: node for name, node in packed.items() if name not in equal}
        return {
            "settings": settings(trainer),
            "of_all": {name: node for name, node in packed.items() if name in equal},
            "of_each": gather(trainer, differing, group),
            "of_start": [name for name in packed if name in as_started],
            "left": left,
        }

    def put_back(self, trainer: pl.Trainer, saved: dict[str, Any], is_last: bool = True) -> None:
        """Put back what ``keep`` has kept; with `is_last` tell what is lost."""
        nodes, each = dict(saved["of_all"]), saved["of_each"]
        lost: dict[Name, str] = dict.fromkeys(saved["left"], "was not kept")
        if len(each) == trainer.world_size:
            nodes |= each[trainer.global_rank]
        else:
            names = dict.fromkeys(name for one in each for name in one)
            lost |= dict.fromkeys(names, f"differed between {len(each)} processes")
        other: dict[Name, str] = {}
        if saved["settings"] != settings(trainer):  # a hook may have looked at them
            numbers = [n for n in saved["of_start"] if n in nodes and type(nodes[n]) in SCALARS]
            other = {n: f"was {nodes.pop(n)!r}" for n in numbers if n[0] not in (FLAGS, BUFFERS)}
        moved = self._moved(trainer)
        known = {name: value for value, name in known_objects(trainer).values()}
        placer = Placer(known, trainer.strategy.root_device)
        for name, node in nodes.items():
            try:
                set_value(trainer, placer, name, node)
            except Exception as error:  # LostError, or what an author's `load_state_dict` raises
                lost[name] = str(error)
        self.changed |= nodes.keys()
        comparing, alive = self._comparing(trainer), values(trainer)
        self.placed = {n: self._print(comparing, alive[n]) for n in nodes if n in alive}
        self.started |= {
            name: self._print(comparing, alive[name]) for name in saved["of_start"] if name in alive
        }
        if is_last and trainer.is_global_zero:
            other = {n: f"{was}, is {alive.get(n)!r}" for n, was in other.items()}
            other = {n: text for n, text in other.items() if f"was {alive.get(n)!r}," not in text}
            tell_lost(trainer, lost, other, moved)
            tell_copied(trainer, saved, [n for n in nodes if n not in lost])

    def _moved(self, trainer: pl.Trainer) -> list[Name]:
        """What is not as it was put back: reading or moving the first batch has changed it.

        Live values are compared with live ones. Packed ones of two processes may differ where the
        values do not, as by what was there when training began.
        """
        comparing, alive = self._comparing(trainer), values(trainer)
        there = self.placed.keys() & alive.keys()
        return sorted(n for n in there if self._print(comparing, alive[n]) != self.placed[n])

    def _comparing(self, trainer: pl.Trainer) -> Packer:
        known = {key: name for key, (_, name) in known_objects(trainer).items()}
        return Packer(known, None, self.most_bytes)

    @staticmethod
    def _print(packer: Packer, value: Any) -> Any:
        packer.packed, packer.num_bytes = {}, 0
        if type(value) in (bool, int, float, str):
            return type(value), repr(value)  # NaN is equal to itself, and 0.0 not to -0.0
        try:
            return fingerprint(packer.pack(value))
        except UnkeptError:
            return rough_print(value)

    def _tell_left(self, trainer: pl.Trainer, left: dict[Name, str]) -> None:
        """Say once what checkpoints do not hold."""
        new = {name: why for name, why in left.items() if name not in self.told}
        self.told |= new.keys()
        new = {name: why for name, why in new.items() if not is_handled(trainer, name)}
        if new and trainer.is_global_zero:
            is_large = any("MB" in why for why in new.values())
            warn_of(
                trainer,
                "Checkpoints lack %s: a run that goes on from one begins anew with it.\nKeep it as "
                "a buffer (register_buffer), or give a module on_save_checkpoint and "
                "on_load_checkpoint, a callback or data module state_dict and load_state_dict%s.",
                new,
                ", or set checkpoint.attribute_megabytes higher" if is_large else "",
            )


def tell_lost(
    trainer: pl.Trainer, lost: dict[Name, str], other: dict[Name, str], moved: list[Name]
) -> None:
    """Say of which attributes a run goes on otherwise than it was stopped."""
    if lost := {name: why for name, why in lost.items() if not is_handled(trainer, name)}:
        sentence = "These are as in a run that begins, and what depends on them will differ: %s."
        warn_of(trainer, sentence, lost)
    if other:
        warn_of(
            trainer,
            "The run goes on with other processes, devices or epochs, and with what its hooks have "
            "set now: %s.",
            other,
        )
    if moved := [name for name in moved if name not in lost]:
        warn_of(
            trainer,
            "The first batch was read or moved with the values of these after it, and may differ: "
            "%s.",
            dict.fromkeys(moved, "changes while a batch is read or moved"),
        )


def tell_copied(trainer: pl.Trainer, saved: dict[str, Any], names: list[Name]) -> None:
    """Say what each process of another number of them has got, as it may be counted twice."""
    before, now = saved["settings"][0], trainer.world_size
    if before == now:
        return
    changed = saved["of_all"].keys() - set(saved["of_start"])
    counts = [
        name
        for name in names
        if name in changed
        and name[0] != FLAGS
        and type(saved["of_all"][name]) not in (type(None), bool, str)
        and not is_handled(trainer, name)
    ]
    if counts:
        warn_of(
            trainer,
            f"The run had {before} process{'es' * (before > 1)} and has {now} now. Each goes on "
            "with what was equal in all of them, so that counts of a process's own samples have "
            "another sum: %s.",
            dict.fromkeys(counts, ""),
        )


def set_value(trainer: pl.Trainer, placer: Placer, name: Name, node: Any) -> None:
    """Put back one of what ``values`` gives.

    Raises:
        LostError: if it cannot be.
    """
    owner, attribute = name
    module = trainer.lightning_module
    if owner == FLAGS:
        module.get_parameter(attribute).requires_grad_(node)
        return
    owned: Any = owners(trainer).get(owner)
    if owner in (MODULE, BUFFERS):
        path, _, attribute = attribute.rpartition(".")
        owned = module.get_submodule(path)
    kind: Any = type(owned)
    if owner == BUFFERS:
        setattr(owned, attribute, placer.place(node, module.get_buffer(name[1])))
    elif owned is None or attribute in inherited(kind) or attribute.startswith("__"):
        raise LostError("is no attribute of this run")
    elif type(node) is dict and node.get("#") == "deleted":
        vars(owned).pop(attribute, None)
    else:
        placer.set(owned, attribute, node)


def settings(trainer: pl.Trainer) -> list[int]:
    """What hooks at the start may have computed values from."""
    num_devices = trainer.num_devices * trainer.num_nodes
    planned = int(min(trainer.estimated_stepping_batches, 2**62))
    return [trainer.world_size, num_devices, int(trainer.accumulate_grad_batches), planned]
