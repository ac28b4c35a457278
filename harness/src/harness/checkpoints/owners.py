"""Whose attributes a checkpoint keeps, and what they are called."""

import logging
from typing import Any

import pytorch_lightning as pl

from harness.checkpoints.belongings import (
    MACHINERY,
    assignments,
    mentions,
    named_attributes,
    own_attributes,
    package,
)
from harness.places import is_owners
from harness.upstream.resume import unsaved_buffers

log = logging.getLogger(__name__)
Name = tuple[str, str]  # an owner, and its attribute
FLAGS, BUFFERS, MODULE, DATA, CALLBACK = "requires_grad", "buffer", "module", "data", "callback "
NUM_SHOWN = 5  # attributes of one message on the screen


def authors_callbacks(trainer: pl.Trainer) -> dict[str, pl.Callback]:
    """The callbacks that are neither Lightning's nor ours, by class and, if needed, number."""
    found: dict[str, pl.Callback] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set untyped
        if package(type(callback)) not in MACHINERY:
            name = type(callback).__qualname__
            number = sum(other.partition("#")[0] == name for other in found)
            found[f"{name}#{number + 1}" if number else name] = callback
    return found


def owners(trainer: pl.Trainer) -> dict[str, Any]:
    """Those whose attributes are kept, by name."""
    found: dict[str, Any] = {MODULE: trainer.lightning_module}
    if (data := getattr(trainer, "datamodule", None)) is not None:
        found[DATA] = data
    callbacks = authors_callbacks(trainer)
    return found | {CALLBACK + name: callback for name, callback in callbacks.items()}


def values(trainer: pl.Trainer) -> dict[Name, Any]:
    """All that may be kept."""
    module = trainer.lightning_module
    found: dict[Name, Any] = {}
    for owner, owned in owners(trainer).items():
        attributes = named_attributes(owned) if owner == MODULE else own_attributes(owned).items()
        found |= {(owner, name): value for name, value in attributes}
    found |= {(FLAGS, name): p.requires_grad for name, p in module.named_parameters()}
    return found | {(BUFFERS, name): module.get_buffer(name) for name in unsaved_buffers(module)}


def known_objects(trainer: pl.Trainer) -> dict[int, tuple[Any, str]]:
    """What a checkpoint holds in other places, or every run builds, by id: it is only named."""
    module = trainer.lightning_module
    unsaved = set(unsaved_buffers(module))
    named: list[tuple[str, Any]] = [("trainer", trainer)]
    named += [(f"module {name}", part) for name, part in module.named_modules()]
    named += [(f"parameter {name}", tensor) for name, tensor in module.named_parameters()]
    named += [(f"buffer {n}", tensor) for n, tensor in module.named_buffers() if n not in unsaved]
    named += [item for item in owners(trainer).items() if item[0] != MODULE]
    named += [(f"optimizer {i}", one) for i, one in enumerate(trainer.optimizers)]
    schedules = enumerate(trainer.lr_scheduler_configs)
    named += [(f"schedule {i}", config.scheduler) for i, config in schedules]
    return {id(value): (value, name) for name, value in named}


def is_handled(trainer: pl.Trainer, name: Name) -> bool:
    """Whether the owner itself loads an attribute from checkpoints."""
    owner, attribute = name
    found = owners(trainer)
    if owner not in found or "." in attribute:
        return False
    methods = ("on_load_checkpoint", "load_state_dict")
    return any(mentions(found[owner], method, attribute) for method in methods)


def warn_of(trainer: pl.Trainer, sentence: str, reasons: dict[Name, str], *rest: Any) -> None:
    """Warn of attributes, each with the line that sets it; ``run.log`` gets all of many.

    Args:
        trainer: has their owners.
        sentence: has a ``%s`` for them, and further ones for the rest.
        reasons: what is to be said of each.
        rest: what else the sentence takes.
    """
    every = [full_name(trainer, name) + f" ({why})" * bool(why) for name, why in reasons.items()]
    num_more = len(every) - NUM_SHOWN
    more = f" and {num_more} more, which are in run.log" if num_more > 0 else ""
    log.warning(sentence, ", ".join(every[:NUM_SHOWN]) + more, *rest)
    if more:
        log.info("All %d of these: %s", len(every), ", ".join(every))


def full_name(trainer: pl.Trainer, name: Name) -> str:
    """As ``MyModule.history, set in models/mine.py:12 in training_step``."""
    owner, attribute = name
    module = trainer.lightning_module
    owned = owners(trainer).get(owner, module)
    if owner in (FLAGS, BUFFERS):
        return f"{type(module).__name__}.{attribute}" + ".requires_grad" * (owner == FLAGS)
    path, _, last = attribute.rpartition(".")
    holder = module.get_submodule(path) if owner == MODULE else owned
    label = f"{type(owned).__name__}.{attribute}"
    for kind in type(holder).__mro__:
        for function in vars(kind).values():
            for found, place in assignments(function):
                if found == last and is_owners(place.file):
                    return f"{label}, set in {place}"
    return label
