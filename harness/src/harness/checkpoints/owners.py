"""Finds the Python values that training may change and that no ``state_dict`` holds.

In: the trainer. Out: each value by the name of its owner and of the attribute. Next: ``attributes``
compares them with those of the start, and keeps what differs.
"""

import warnings
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn
from torchmetrics import Metric, SumMetric

from harness.data.loaders import leaves
from harness.data.randomness import GENERATORS
from harness.data.sampler_numbers import samplers_in
from harness.data.shared_batches import SharedBatchSampler
from harness.shards import parted_like, whole

Name = tuple[str, str]  # an owner, and its attribute
FLAG, GRADIENT, SAMPLER = "requires_grad", "gradient", "batch sampler"
HYPER_PARAMETERS = " hparams"  # ends the name of an owner
# The state of ``fully_shard`` on a module: who looks at its tensors' memory keeps it from growing.
OF_FSDP = "__composable_api_state_key"
MACHINERY = ("pytorch_lightning", "lightning_fabric", "torchmetrics", "harness")


def package(value: Any) -> str:
    """The package that defines the class of an object."""
    return type(value).__module__.partition(".")[0]


def authors_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks that are neither Lightning's nor the harness's."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
    return [callback for callback in callbacks if package(callback) not in MACHINERY]


def owners(trainer: pl.Trainer) -> dict[str, Any]:
    """The objects whose attributes are looked at, by name."""
    found: dict[str, Any] = {}
    for path, part in trainer.lightning_module.named_modules():
        if package(part) not in MACHINERY:
            found[f"module.{path}".rstrip(".")] = part
    if (data := getattr(trainer, "datamodule", None)) is not None:
        found["data"] = data
    for callback in authors_callbacks(trainer):
        name = f"callback {type(callback).__name__}"
        number = sum(other.partition("#")[0] == name for other in found)
        found[f"{name}#{number + 1}" if number else name] = callback
    found |= {f"optimizer {i}": one for i, one in enumerate(trainer.optimizers)}
    return found | {f"{SAMPLER} {i}": one for i, one in enumerate(authors_samplers(trainer))}


def authors_samplers(trainer: pl.Trainer) -> list[Any]:
    """The samplers and batch samplers of the training loaders that are not torch's own."""
    if trainer.train_dataloader is None:
        return []
    shared = [getattr(one, "batch_sampler", None) for one in leaves(trainer.train_dataloader)]
    batches = [one.batches for one in shared if isinstance(one, SharedBatchSampler)]
    return [s for b in batches for s in samplers_in(b) if package(s) not in ("torch", "harness")]


@lru_cache
def hidden(kind: Any) -> set[str]:
    """The attributes of a class's objects that Lightning or torch keep for themselves."""
    module, data = pl.LightningModule(), pl.LightningDataModule()
    for owner in (module, data):
        owner.save_hyperparameters({"a": 1})
    optimizer = torch.optim.SGD([torch.zeros(1)])
    with warnings.catch_warnings(action="ignore"):
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # which leaves marks on it
    stock: dict[type, Any] = {
        nn.Module: nn.Module(),
        pl.LightningModule: module,
        pl.LightningDataModule: data,
        Metric: SumMetric(),
        torch.optim.Optimizer: optimizer,
    }
    names = {name for base, one in stock.items() if issubclass(kind, base) for name in vars(one)}
    return names - {"training"}


def extends_lightnings(kind: type) -> bool:
    """Whether a callback's class extends one of Lightning's, and not ``Callback`` alone."""
    bases = (b for b in kind.__mro__ if issubclass(b, pl.Callback) and b is not pl.Callback)
    return any(base.__module__.startswith("pytorch_lightning.") for base in bases)


def attributes_of(owner: Any) -> dict[str, Any]:
    """The attributes of an object that its author has made.

    So are the lists and dicts of its class, which all objects share. A function that stands before
    a method was put there by Lightning or the harness.
    """
    kind: Any = type(owner)
    found: dict[str, Any] = {}
    for base in kind.__mro__[::-1]:
        if base.__module__.partition(".")[0] not in (*MACHINERY, "torch"):
            found |= {
                name: value
                for name, value in vars(base).items()
                if isinstance(value, (list, dict, set, deque)) and not name.startswith("__")
            }
    found |= vars(owner)
    states: Any = owner.metric_state if isinstance(owner, Metric) else ()
    if isinstance(owner, pl.Callback) and extends_lightnings(kind):
        # Such as a ModelCheckpoint: Lightning saves what it needs of its own.
        found = {n: v for n, v in found.items() if not n.startswith("_")}
        states = owner.state_dict()
    return {
        name: value
        for name, value in found.items()
        if name not in hidden(kind)
        and name not in states
        and not name.startswith(OF_FSDP)
        and not (callable(value) and callable(getattr(kind, name, None)))
    }


def values(trainer: pl.Trainer) -> dict[Name, Any]:
    """All values that a checkpoint may keep."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    found: dict[Name, Any] = {}
    for label, owner in owners(trainer).items():
        found |= {(label, name): value for name, value in attributes_of(owner).items()}
        if label.startswith(SAMPLER):  # numbers are kept with the loaders' position
            seeded = (bool, int, float, *GENERATORS)
            found = {n: v for n, v in found.items() if n[0] != label or not isinstance(v, seeded)}
    for label, owner in (("module", module), ("data", data)):
        if owner is not None:
            found |= {(label + HYPER_PARAMETERS, k): v for k, v in owner.hparams.items()}
    found |= {unsaved: module.get_buffer(unsaved[1]) for unsaved in unsaved_buffers(module)}
    found |= {(FLAG, name): p.requires_grad for name, p in module.named_parameters()}
    # Lightning's own steps clear a gradient before it is computed; an author's may let it wait.
    if not module.automatic_optimization or is_overridden("optimizer_zero_grad", module):
        named = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
        found |= {(GRADIENT, name): whole(gradient) for name, gradient in named}
    return found


def unsaved_buffers(module: nn.Module) -> Iterator[Name]:
    """The buffers that no checkpoint holds: those that are not persistent."""
    saved = nn.Module.state_dict(module)  # not an author's own, which may leave weights out
    for path, part in module.named_modules():
        if not isinstance(part, Metric):
            names = (name for name, _ in part.named_buffers(path, recurse=False))
            yield from (("buffer", name) for name in names if name not in saved)


def set_value(trainer: pl.Trainer, name: Name, value: Any) -> None:
    """Set one of what ``values`` gives.

    Raises:
        KeyError: its owner is not there.
    """
    label, attribute = name
    module = trainer.lightning_module
    if label == FLAG:
        module.get_parameter(attribute).requires_grad_(value)
    elif label == GRADIENT:
        parameter = module.get_parameter(attribute)
        parameter.grad = parted_like(value.to(parameter.device), parameter)
    elif label.endswith(HYPER_PARAMETERS):
        owner: Any = module if label.startswith("module") else trainer.datamodule  # type: ignore[attr-defined]
        owner.hparams[attribute] = value
    elif label == "buffer":
        path, _, attribute = attribute.rpartition(".")
        setattr(module.get_submodule(path), attribute, value)
    else:
        setattr(owners(trainer)[label], attribute, value)


def known_objects(trainer: pl.Trainer) -> dict[int, str]:
    """What a checkpoint holds in other places, or every run builds, by id: it is only named."""
    module = trainer.lightning_module
    named: list[tuple[str, Any]] = [("trainer", trainer), *owners(trainer).items()]
    named += [*module.named_modules(), *module.named_parameters(), *module.named_buffers()]
    named += [(f"schedule {i}", c.scheduler) for i, c in enumerate(trainer.lr_scheduler_configs)]
    return {id(value): name for name, value in named}


def is_handled(trainer: pl.Trainer, name: Name) -> bool:
    """Whether its owner, or the module that holds it, loads an attribute from checkpoints."""
    holders = [owners(trainer).get(name[0])]
    holders += [trainer.lightning_module] * name[0].startswith("module.")
    for holder in holders:
        for method in ("on_load_checkpoint", "load_state_dict"):
            code = getattr(getattr(type(holder), method, None), "__code__", None)
            if code is not None and name[1] in (*code.co_names, *code.co_consts):
                return True
    return False


def structure(trainer: pl.Trainer) -> dict[str, Any]:
    """What must be the same where a run goes on: the shapes of weights, and the optimizers."""
    state = nn.Module.state_dict(trainer.lightning_module)
    found: dict[str, Any] = {
        name: None if nn.parameter.is_lazy(value) else tuple(value.shape)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
    has_own_groups = any(isinstance(c, pl.callbacks.BaseFinetuning) for c in callbacks)
    for i, optimizer in enumerate(trainer.optimizers):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        groups = None if has_own_groups else sizes  # Lightning brings those back
        found[f"optimizer {i}"] = (type(optimizer).__qualname__, groups)
    return found


def changed_structure(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The names of weights and optimizers that are new, gone, or of another shape or class."""
    both = before.keys() & now.keys()
    other = {n for n in both if None not in (before[n], now[n]) and before[n] != now[n]}
    return sorted((before.keys() ^ now.keys()) | other)
