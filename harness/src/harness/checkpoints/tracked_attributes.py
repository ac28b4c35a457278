"""Finds the Python values that training may change and that no ``state_dict`` holds.

In: the trainer. Out: each value by the name of its owner and of the attribute. Next: ``attributes``
compares them with those of the start, and keeps what differs.
"""

from collections import deque
from functools import cache
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, SumMetric

from harness.checkpoints.digests import IGNORED
from harness.compat import callbacks_of
from harness.data.datamodule import DataModule
from harness.data.loaders import flat_loaders
from harness.data.randomness import GENERATORS
from harness.data.samplers import samplers_in
from harness.data.shared_batches import SharedBatchSampler
from harness.kinds import FRAMEWORKS, REPORTING, package
from harness.sharded import full_tensor, shard_like

Name = tuple[str, str]  # an owner, and its attribute
FLAG, GRADIENT, SAMPLER = "requires_grad", "gradient", "batch sampler"
# The state of ``fully_shard`` on a module: a digest of its tensors would keep their memory.
OF_FSDP = "__composable_api_state_key"


def submodules_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return a module and its submodules, by the names that checkpoints have for them."""
    return {f"module.{path}".rstrip("."): part for path, part in module.named_modules()}


def has_attributes(part: nn.Module) -> bool:
    """Return whether attributes of a submodule may count, beside what its ``state_dict`` holds."""
    kind = type(part)  # MinMaxMetric, Running and others keep numbers that are no states
    return package(kind) not in FRAMEWORKS or kind.__module__.startswith("torchmetrics.wrappers.")


def tracked_objects(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the objects whose attributes a checkpoint may keep, by name."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    parts = submodules_of(module).items()
    found: dict[str, Any] = {n: part for n, part in parts if has_attributes(part)}
    found["module hparams"] = module.hparams
    if data is not None:
        found |= {"data": data, "data hparams": data.hparams}
    for callback in (c for c in callbacks_of(trainer) if package(type(c)) not in FRAMEWORKS):
        name = f"callback {type(callback).__name__}"
        number = sum(other.partition("#")[0] == name for other in found)
        found[f"{name}#{number + 1}" if number else name] = callback
    found |= {f"optimizer {i}": one for i, one in enumerate(trainer.optimizers)}
    loaders = flat_loaders(trainer.train_dataloader) if trainer.train_dataloader is not None else []
    shared = [getattr(loader, "batch_sampler", None) for loader in loaders]
    batches = [one.batches for one in shared if isinstance(one, SharedBatchSampler)]
    samplers = [sampler for one in batches for sampler in samplers_in(one)]
    authors = [one for one in samplers if package(type(one)) not in ("torch", "harness")]
    return with_contained_objects(found) | {f"{SAMPLER} {i}": one for i, one in enumerate(authors)}


def with_contained_objects(found: dict[str, Any]) -> dict[str, Any]:
    """Add the objects that attributes of these owners hold, such as a running mean or a config."""
    seen, held = {id(owner) for owner in found.values()}, dict[str, Any]()
    for name, owner in found.items():
        is_dict = isinstance(owner, dict)  # hyper-parameters
        for attribute, value in (owner if is_dict else vars(owner)).items():
            kind: Any = type(value)
            if not is_user_class(kind) or not hasattr(value, "__dict__") or id(value) in seen:
                continue
            if is_dict or is_kept(owner, attribute):
                seen.add(id(value))
                held[f"{name}.{attribute}"] = value
    return found | held


@cache
def is_user_class(kind: Any) -> bool:
    """Return whether the state of a class's objects is their attributes, as pickle sees it."""
    packages = {package(base) for base in kind.__mro__[:-1]}
    if packages & {*FRAMEWORKS, *REPORTING, "torch", "builtins"} or issubclass(kind, IGNORED):
        return False
    how = ("__reduce__", "__reduce_ex__", "__getstate__")
    is_plain = all(getattr(kind, name) is getattr(object, name) for name in how)
    return is_plain and not hasattr(kind, "__setstate__")


@cache
def framework_attributes(kind: Any) -> set[str]:
    """Return the names of the attributes that Lightning or torch give to objects of a class."""
    module, data = pl.LightningModule(), pl.LightningDataModule()
    module.save_hyperparameters({"a": 1})
    data.save_hyperparameters({"a": 1})
    optimizer = torch.optim.SGD([torch.zeros(1)])
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # which leaves marks on it
    made = (nn.Module(), module, data, SumMetric(), optimizer)
    bases = (nn.Module, pl.LightningModule, pl.LightningDataModule, Metric, torch.optim.Optimizer)
    of_kind = [one for one, base in zip(made, bases, strict=True) if issubclass(kind, base)]
    names = {name for one in of_kind for name in vars(one)} - {"training"}
    return names | ({"datasets"} if issubclass(kind, DataModule) else set())  # made when asked for


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return attributes of an object, and collections of its class, that its author has made."""
    kind: Any = type(owner)
    if issubclass(kind, dict):  # hyper-parameters
        return dict(owner)
    authors = [base for base in kind.__mro__[::-1] if package(base) not in (*FRAMEWORKS, "torch")]
    of_class = [item for base in authors for item in vars(base).items() if item[0][:2] != "__"]
    found = {n: v for n, v in of_class if isinstance(v, (list, dict, set, deque))} | vars(owner)
    return {
        name: value
        for name, value in found.items()
        # A function in the place of a method was put there by Lightning or the harness.
        if is_kept(owner, name) and not (callable(value) and callable(getattr(kind, name, None)))
    }


def is_kept(owner: Any, name: str) -> bool:
    """Return whether an attribute of this name may be its author's, and no ``state_dict`` has it.

    A checkpoint is asked for no other, as it may be a stranger's: ``best_k_models`` of a
    ``ModelCheckpoint`` names files that are deleted.
    """
    kind: Any = type(owner)
    if name in framework_attributes(kind) or name.startswith((OF_FSDP, "__")):
        return False
    if isinstance(owner, Metric):
        return name not in owner.metric_state
    stock = [x for x in kind.__mro__ if x.__module__.startswith("pytorch_lightning.")]
    if isinstance(owner, pl.Callback) and len(stock) > 1:  # such as a subclass of ModelCheckpoint
        return not name.startswith("_") and name not in owner.state_dict()
    return True


def tracked_values(trainer: pl.Trainer) -> dict[Name, Any]:
    """Return all values that a checkpoint may keep."""
    module, found = trainer.lightning_module, dict[Name, Any]()
    for label, owner in tracked_objects(trainer).items():
        # The numbers and generators of samplers are kept with the loaders' position.
        seeded = (bool, int, float, *GENERATORS) if label.startswith(SAMPLER) else ()
        own = attributes_of(owner)
        found |= {(label, n): v for n, v in own.items() if not isinstance(v, seeded)}
    found |= unsaved_buffers(module)
    parameters = dict(module.named_parameters())
    found |= {(FLAG, name): parameter.requires_grad for name, parameter in parameters.items()}
    # Lightning's own steps clear a gradient before it is computed; an author's may let it wait.
    if not module.automatic_optimization or is_overridden("optimizer_zero_grad", module):
        waiting = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        found |= {(GRADIENT, name): full_tensor(gradient) for name, gradient in waiting.items()}
    return found


def unsaved_buffers(module: nn.Module) -> dict[Name, Any]:
    """Return the buffers that are not persistent, but for those of metrics."""
    saved = nn.Module.state_dict(module)  # not an author's own, which may leave weights out
    return {
        (f"module.{path}".rstrip("."), name): buffer
        for path, part in module.named_modules()
        if not isinstance(part, Metric)
        for name, buffer in part.named_buffers(recurse=False)
        if f"{path}.{name}".lstrip(".") not in saved
    }


def object_structure(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what a resumed run must build alike: shapes of its tensors, and its optimizers."""
    state = nn.Module.state_dict(trainer.lightning_module).items()
    tensors = {name: value for name, value in state if isinstance(value, torch.Tensor)}
    # A lazy layer has no shape before its first batch, and an observer loads those of any shape.
    parts = trainer.lightning_module.named_modules()
    observers = {
        n for n, part in parts if type(part).__module__.startswith("torch.ao.quantization")
    }
    found: dict[str, Any] = {
        name: is_lazy(tensor) or name.rpartition(".")[0] in observers or tuple(tensor.shape)
        for name, tensor in tensors.items()
    }
    # Lightning brings back the groups that these have added.
    adds_groups = any(isinstance(c, pl.callbacks.BaseFinetuning) for c in callbacks_of(trainer))
    for i, optimizer in enumerate(trainer.optimizers):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        found[f"optimizer {i}"] = type(optimizer).__qualname__, adds_groups or sizes
    return found


def set_value(module: nn.Module, found: dict[str, Any], name: Name, value: Any) -> None:
    """Set a value that ``tracked_values`` lists, of a module or of an object in ``found``.

    Raises:
        KeyError: its owner is not there, or ``tracked_values`` gives no attribute of that name.
    """
    label, attribute = name
    if label == FLAG:
        module.get_parameter(attribute).requires_grad_(value)
    elif label == GRADIENT:
        parameter = module.get_parameter(attribute)
        parameter.grad = shard_like(value.to(parameter.device), parameter)
    elif isinstance(owner := found[label], dict):
        owner[attribute] = value
    elif is_kept(owner, attribute) and not callable(getattr(type(owner), attribute, None)):
        setattr(owner, attribute, value)
    else:
        raise KeyError(f"no attribute of {label} is restored as {attribute}")


def named_objects(trainer: pl.Trainer) -> dict[int, str]:
    """Return the names, by id, of objects saved elsewhere or built anew in every run."""
    module = trainer.lightning_module
    named: list[tuple[str, Any]] = [("trainer", trainer), *tracked_objects(trainer).items()]
    named += [*module.named_modules(), *module.named_parameters(), *module.named_buffers()]
    named += [(f"schedule {i}", c.scheduler) for i, c in enumerate(trainer.lr_scheduler_configs)]
    unsaved = {id(buffer) for buffer in unsaved_buffers(module).values()}
    return {id(value): name for name, value in named if id(value) not in unsaved}
