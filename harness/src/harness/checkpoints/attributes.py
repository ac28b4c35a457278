"""Keeps the Python attributes that training has changed, with a checkpoint.

In: the values that ``owners`` finds. Kept are those that differ from how they were when the run
began, so that settings of a new command stay, and that are plain (see ``plain``). Any other that
has changed is named once. Next: ``safe_point`` writes them, and has them put back on resume.
"""

import copy
import logging
import weakref
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from harness.checkpoints.fingerprints import fingerprint
from harness.checkpoints.owners import (
    FLAG,
    GRADIENT,
    SAMPLER,
    Name,
    changed_structure,
    is_handled,
    known_objects,
    set_value,
    structure,
    values,
)
from harness.checkpoints.plain import (
    MARK,
    SCALARS,
    TENSORS,
    NotPlainError,
    Packer,
    Unpacker,
)
from harness.names import few
from harness.processes.agreement import gather

log = logging.getLogger(__name__)

LARGEST_MEGABYTES = 256  # of one tensor or array, in every process
NUM_SHOWN = 5  # attributes of one message
ADVICE = (
    "Keep it as numbers, text, lists, dicts, arrays, a buffer or a torchmetric, or write it in "
    "on_save_checkpoint and read it in on_load_checkpoint (of a callback: state_dict and "
    "load_state_dict)."
)


class AttributePacker(Packer):
    """Packs attributes: tensors become copies on the CPU, objects are refused.

    Args:
        names: of parameters and others that a checkpoint holds in another place, by id.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.reached: set[int] = set()  # ids of the containers and tensors of one attribute

    def pack(self, value: Any, place: tuple[Any, ...] = ()) -> Any:
        """See ``Packer``."""
        if not isinstance(value, (tuple, frozenset, np.generic)) and type(value) not in SCALARS:
            self.reached.add(id(value))
        is_large = getattr(value, "nbytes", 0) > LARGEST_MEGABYTES * 2**20
        if is_large and place[:1] != (GRADIENT,):
            raise NotPlainError(f"more than {LARGEST_MEGABYTES} MB")
        return super().pack(value, place)

    def tensor(self, value: torch.Tensor, place: tuple[Any, ...]) -> Any:
        """Copy a tensor to the CPU; of one with a graph its values."""
        if type(value) not in TENSORS or value.is_meta:
            return self.other(value, place)
        if id(value) in self.names and place[:1] != ("buffer",):
            raise NotPlainError(f"it holds {self.names[id(value)]}")
        if value.requires_grad and value.is_leaf:
            raise NotPlainError("a tensor that is trained, and no parameter")
        data = value.detach().to("cpu", copy=True)
        return data if value.device.type == "cpu" else {MARK: "tensor", "data": data}


class Attributes:
    """Compares attributes with those of the start, keeps what differs, and puts it back."""

    def __init__(self) -> None:
        self.fresh: dict[Name, Any] = {}  # fingerprints before the hooks at the start
        self.started: dict[Name, Any] = {}  # those that these hooks have changed
        self.objects: dict[Name, Any] = {}  # what was there after them
        self.structure: dict[str, Any] = {}
        self.placed: dict[Name, Any] = {}  # fingerprints of what was put back
        self.told: set[str | Name] = set()

    def begin(self, trainer: pl.Trainer) -> None:
        """Look at all values before the hooks at the start."""
        self.fresh, self.structure = fingerprints(trainer), structure(trainer)

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Look at them after these hooks."""
        alive, now = values(trainer), fingerprints(trainer)
        self.fresh |= {name: now[name] for name in now if name[0].startswith(SAMPLER)}
        self.started = {name: now[name] for name in now if now[name] != self.fresh.get(name)}
        self.objects = {
            name: weakref.ref(value) if isinstance(value, (torch.Tensor, np.ndarray)) else value
            for name, value in alive.items()
        }

    def keep(self, trainer: pl.Trainer, group: Any = None) -> dict[str, Any]:
        """What a checkpoint holds of all processes; what it does not is named once."""
        alive, now = values(trainer), fingerprints(trainer)
        packer = AttributePacker(known_objects(trainer))
        nodes: dict[Name, Any] = {}
        reached: dict[Name, set[int]] = {}
        lost = {name: "was deleted" for name in self.fresh if name not in alive}
        for name in (name for name in alive if now[name] != self.fresh.get(name)):
            packer.reached = reached[name] = set()
            try:
                if name[0].startswith(SAMPLER):
                    raise NotPlainError("a sampler's; its numbers are kept")
                nodes[name] = packer.pack(alive[name], name)
            except NotPlainError as reason:
                # Hooks at the start make it again, unless it was computed from the weights.
                has_tensors = now[name][1]
                if now[name] != self.started.get(name) or has_tensors:
                    lost[name] = str(reason)
        common, each = nodes, [dict[Name, Any]()]
        if trainer.world_size > 1:
            found = gather(trainer, ({n: now[n] for n in nodes}, lost), group)
            lost = {name: why for _, of_one in found for name, why in of_one.items()}
            differing = {n for n in nodes if any(there.get(n) != now[n] for there, _ in found)}
            differing = with_shared(differing, reached)
            common = {name: node for name, node in nodes.items() if name not in differing}
            each = gather(trainer, {n: nodes[n] for n in nodes if n in differing}, group)
        self._tell_lost(trainer, lost)
        return {
            "settings": settings(trainer),
            "common": common,
            "each": each,
            "of_start": [n for n in nodes if n in self.started and self.started[n] == now[n]],
            "in_place": [n for n in nodes if self._is_first(n, alive[n])],
            "lost": lost,
        }

    def _is_first(self, name: Name, value: Any) -> bool:
        """Whether an attribute is still the object that it was when training began."""
        first = self.objects.get(name)
        return (first() if isinstance(first, weakref.ref) else first) is value

    def put_back(self, trainer: pl.Trainer, saved: dict[str, Any], is_last: bool = True) -> None:
        """Put back what ``keep`` has kept; with `is_last` tell what is lost."""
        each, lost = saved["each"], dict(saved["lost"])
        of_this_rank: dict[Name, Any] = {}
        if len(each) == trainer.world_size:
            of_this_rank = each[trainer.global_rank]
        else:
            names = {name for one in each for name in one}
            lost |= dict.fromkeys(names, f"differed between {len(each)} processes")
        nodes: dict[Name, Any] = copy.deepcopy({**saved["common"], **of_this_rank})
        # Hooks at the start may have computed numbers from the processes, devices or epochs.
        others: dict[Name, Any] = {}
        if saved["settings"] != settings(trainer):
            numbers = [n for n in saved["of_start"] if type(nodes.get(n, [])) in SCALARS]
            others = {name: nodes.pop(name) for name in numbers if name[0] != FLAG}
        before, alive = fingerprints(trainer), values(trainer)
        others = {name: was for name, was in others.items() if alive.get(name) != was}
        moved = [n for n, placed in self.placed.items() if before.get(n) != placed]
        targets = {id(nodes[n]): alive[n] for n in saved["in_place"] if n in nodes and n in alive}
        unpacker = Unpacker(trainer.strategy.root_device, targets)
        for name, node in nodes.items():
            try:
                set_value(trainer, name, unpacker.unpack(node))
            except Exception as error:  # its owner is not there, or refuses it
                lost[name] = f"{type(error).__name__}: {error}"
        now = fingerprints(trainer)
        self.placed = {name: now[name] for name in nodes if name in now}
        self.started |= {name: now[name] for name in saved["of_start"] if name in now}
        lost |= {
            n: f"was {was!r}, and a hook has set {alive.get(n)!r}" for n, was in others.items()
        }
        lost |= {n: "changes while a batch is read or moved" for n in moved if n not in lost}
        if is_last:
            self._tell_resumed(trainer, lost, saved)

    def _tell_resumed(
        self, trainer: pl.Trainer, lost: dict[Name, str], saved: dict[str, Any]
    ) -> None:
        """Say of which attributes a run goes on otherwise than it was stopped."""
        counts = [
            name
            for name, node in saved["common"].items()
            if name not in (*saved["of_start"], *lost)
            and name[0] not in (FLAG, GRADIENT)
            and type(node) not in (type(None), bool, str)
        ]
        before, now = saved["settings"][0], trainer.world_size
        for names, sentence in (
            (lost, "These are not as they were, and what depends on them will differ: %s."),
            (
                dict.fromkeys(counts if before != now else [], ""),
                f"The run had {before} processes and has {now} now. Each goes on with what was "
                "equal in all of them, so that counts of a process's own samples have another "
                "sum: %s.",
            ),
        ):
            shown = {name: why for name, why in names.items() if not is_handled(trainer, name)}
            if shown and trainer.is_global_zero:
                log.warning(sentence, listed(shown))

    def _tell_lost(self, trainer: pl.Trainer, lost: dict[Name, str]) -> None:
        """Name once what checkpoints lack, and what keeps any run from going on from them."""
        changed = changed_structure(self.structure, structure(trainer))
        new = {name: why for name, why in lost.items() if name not in self.told}
        new = {name: why for name, why in new.items() if not is_handled(trainer, name)}
        is_new_structure = not self.told.issuperset(changed)
        self.told |= {*new, *changed}
        if not trainer.is_global_zero:
            return
        if new:
            log.warning(
                "Checkpoints lack %s: a run that goes on from one begins anew with it.\n%s",
                listed(new),
                ADVICE,
            )
        if is_new_structure:
            log.warning(
                "Training has added, removed or exchanged %s: no run can go on from checkpoints "
                "that are written from here on, since it would build the module as this one began."
                "\nBuild all layers in __init__ or configure_model and all optimizers in "
                "configure_optimizers, and freeze what is not trained yet.",
                few(changed, NUM_SHOWN),
            )


def fingerprints(trainer: pl.Trainer) -> dict[Name, Any]:
    """The digest of each value."""
    names = known_objects(trainer)
    buffers = {id(buffer) for buffer in trainer.lightning_module.buffers()}
    apart = {key: name for key, name in names.items() if key not in buffers}
    return {
        name: fingerprint(value, apart if name[0] == "buffer" else names)
        for name, value in values(trainer).items()
    }


def with_shared(names: set[Name], reached: dict[Name, set[int]]) -> set[Name]:
    """Some names and all that share a list, dict or tensor with one of them, at any distance."""
    while True:
        ids = {key for name in names for key in reached[name]}
        more = {name for name, keys in reached.items() if keys & ids} - names
        if not more:
            return names
        names = names | more


def settings(trainer: pl.Trainer) -> list[int]:
    """What hooks at the start may have computed values from."""
    num_devices = trainer.num_devices * trainer.num_nodes
    planned = int(min(trainer.estimated_stepping_batches, 2**62))
    return [trainer.world_size, num_devices, int(trainer.accumulate_grad_batches), planned]


def listed(reasons: dict[Name, str]) -> str:
    """Attributes as ``module.history (a list of objects)``, the first few of them."""
    texts = [f"{owner}.{name}" + f" ({why})" * bool(why) for (owner, name), why in reasons.items()]
    return few(texts, NUM_SHOWN)
