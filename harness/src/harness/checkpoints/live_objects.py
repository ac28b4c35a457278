"""What a checkpoint's hyper-parameters only name, taken from the module that goes on with them."""

from typing import Any

import pytorch_lightning as pl

from harness.checkpoints.stand_in import StandIn, type_name


def put_live_objects(checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
    """Put a module's own objects where its saved hyper-parameters hold what was not built.

    A run that goes on has built its module from the same config, with equal objects: an
    ``on_load_checkpoint`` that looks for them finds them, and nothing in the file is executed. An
    object that the author has saved in another place as well is put there too.

    Args:
        checkpoint: as it was read; it is changed.
        trainer: has the module and the data module that the checkpoint is loaded into.
    """
    live: dict[int, Any] = {}
    owners = {"hyper_parameters": trainer.lightning_module}
    owners["datamodule_hyper_parameters"] = trainer.datamodule  # type: ignore[attr-defined]  # set untyped
    for key, owner in owners.items():
        saved = checkpoint.get(key)
        if owner is not None and isinstance(saved, dict):
            # Some authors keep an argument as an attribute alone.
            found = {name: getattr(owner, str(name), None) for name in saved}
            _pair(saved, found | dict(owner.hparams), live)
    if live:
        _replace(checkpoint, live, set())


def _pair(saved: Any, live: Any, found: dict[int, Any]) -> None:
    """Find the live object of each stand-in, at the same place and of the same type."""
    if isinstance(saved, StandIn):
        if type_name(saved) == f"{type(live).__module__}.{type(live).__qualname__}":
            found[id(saved)] = live
    elif isinstance(saved, dict) and isinstance(live, dict):
        for key in saved.keys() & live.keys():
            _pair(saved[key], live[key], found)
    elif isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        for one, other in zip(saved, live, strict=False):
            _pair(one, other, found)


def _replace(value: Any, live: dict[int, Any], seen: set[int]) -> Any:
    """Put live objects into dicts and lists, in place."""
    if id(value) in live:
        return live[id(value)]
    if isinstance(value, (dict, list)) and id(value) not in seen:
        seen.add(id(value))
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[key] = _replace(item, live, seen)
    return value
