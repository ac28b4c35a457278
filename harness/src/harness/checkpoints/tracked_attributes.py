"""Find the Python values that training may change and that no ``state_dict`` holds.

In: the trainer. Out: values by name: the label of an object, and its attribute. Next:
``attributes`` compares the values with those at the run's start, and saves those that differ.
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

Name = tuple[str, str]  # the label of an object, and its attribute
FLAG, GRADIENT, SAMPLER = "requires_grad", "gradient", "batch sampler"
# The attribute with the state of ``fully_shard``. A digest would keep its tensors in memory.
FSDP_STATE = "__composable_api_state_key"


def submodules_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return a module and its submodules, by their labels in checkpoints."""
    return {f"module.{path}".rstrip("."): part for path, part in module.named_modules()}


def has_attributes(part: nn.Module) -> bool:
    """Return whether training may change attributes of a submodule that its state dict lacks."""
    kind = type(part)  # wrappers such as MinMaxMetric keep numbers that are not metric states
    return package(kind) not in FRAMEWORKS or kind.__module__.startswith("torchmetrics.wrappers.")


def tracked_objects(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the objects whose attributes a checkpoint may keep, by label."""
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
    found |= {f"optimizer {i}": o for i, o in enumerate(trainer.optimizers)}
    loaders = flat_loaders(trainer.train_dataloader) if trainer.train_dataloader is not None else []
    shared = [getattr(loader, "batch_sampler", None) for loader in loaders]
    batches = [sampler.batches for sampler in shared if isinstance(sampler, SharedBatchSampler)]
    samplers = [sampler for sampled in batches for sampler in samplers_in(sampled)]
    own = [s for s in samplers if package(type(s)) not in ("torch", "harness")]  # the user's
    return with_contained_objects(found) | {f"{SAMPLER} {i}": s for i, s in enumerate(own)}


def with_contained_objects(found: dict[str, Any]) -> dict[str, Any]:
    """Add the objects that attributes of these objects hold, such as a running mean."""
    seen, contained = {id(holder) for holder in found.values()}, dict[str, Any]()
    for label, holder in found.items():
        is_dict = isinstance(holder, dict)  # hyper-parameters
        for attribute, value in (holder if is_dict else vars(holder)).items():
            kind: Any = type(value)
            if not is_user_class(kind) or not hasattr(value, "__dict__") or id(value) in seen:
                continue
            if is_dict or is_kept(holder, attribute):
                seen.add(id(value))
                contained[f"{label}.{attribute}"] = value
    return found | contained


@cache
def is_user_class(kind: Any) -> bool:
    """Return whether a class is the user's, and pickle saves only the attributes of its objects."""
    packages = {package(base) for base in kind.__mro__[:-1]}
    if packages & {*FRAMEWORKS, *REPORTING, "torch", "builtins"} or issubclass(kind, IGNORED):
        return False
    methods = ("__reduce__", "__reduce_ex__", "__getstate__")
    is_plain = all(getattr(kind, name) is getattr(object, name) for name in methods)
    return is_plain and not hasattr(kind, "__setstate__")


@cache
def framework_attributes(kind: Any) -> set[str]:
    """Return the names of the attributes that Lightning or torch set on objects of a class."""
    module, data = pl.LightningModule(), pl.LightningDataModule()
    module.save_hyperparameters({"a": 1})
    data.save_hyperparameters({"a": 1})
    optimizer = torch.optim.SGD([torch.zeros(1)])
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # sets attributes of the optimizer
    objects = (nn.Module(), module, data, SumMetric(), optimizer)
    bases = (nn.Module, pl.LightningModule, pl.LightningDataModule, Metric, torch.optim.Optimizer)
    of_kind = [x for x, base in zip(objects, bases, strict=True) if issubclass(kind, base)]
    names = {name for x in of_kind for name in vars(x)} - {"training"}
    return names | ({"datasets"} if issubclass(kind, DataModule) else set())  # made at first use


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return the user's attributes of an object, and the collections of its class."""
    kind: Any = type(holder)
    if issubclass(kind, dict):  # hyper-parameters
        return dict(holder)
    bases = [base for base in kind.__mro__[::-1] if package(base) not in (*FRAMEWORKS, "torch")]
    class_items = [item for base in bases for item in vars(base).items() if item[0][:2] != "__"]
    found = {n: v for n, v in class_items if isinstance(v, (list, dict, set, deque))} | vars(holder)
    return {
        name: value
        for name, value in found.items()
        # A function that replaces a method comes from Lightning or this library.
        if is_kept(holder, name) and not (callable(value) and callable(getattr(kind, name, None)))
    }


def is_kept(holder: Any, name: str) -> bool:
    """Return whether an attribute may be the user's, and no ``state_dict`` holds it.

    Only such attributes are restored, because a stranger may have written the checkpoint. Others
    are dangerous: Lightning deletes the files that ``ModelCheckpoint.best_k_models`` names.
    """
    kind: Any = type(holder)
    if name in framework_attributes(kind) or name.startswith((FSDP_STATE, "__")):
        return False
    if isinstance(holder, Metric):
        return name not in holder.metric_state
    lightning = [x for x in kind.__mro__ if x.__module__.startswith("pytorch_lightning.")]
    if isinstance(holder, pl.Callback) and len(lightning) > 1:  # a subclass of ModelCheckpoint
        return not name.startswith("_") and name not in holder.state_dict()
    return True


def tracked_values(trainer: pl.Trainer) -> dict[Name, Any]:
    """Return all values that a checkpoint may keep."""
    module, found = trainer.lightning_module, dict[Name, Any]()
    for label, holder in tracked_objects(trainer).items():
        # The numbers and generators of samplers are in another entry, the loaders' position.
        left_out = (bool, int, float, *GENERATORS) if label.startswith(SAMPLER) else ()
        values = attributes_of(holder)
        found |= {(label, n): v for n, v in values.items() if not isinstance(v, left_out)}
    found |= unsaved_buffers(module)
    parameters = dict(module.named_parameters())
    found |= {(FLAG, name): parameter.requires_grad for name, parameter in parameters.items()}
    # Lightning clears gradients before it computes new ones. A user's own steps may keep them.
    if not module.automatic_optimization or is_overridden("optimizer_zero_grad", module):
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        found |= {(GRADIENT, name): full_tensor(grad) for name, grad in gradients.items()}
    return found


def unsaved_buffers(module: nn.Module) -> dict[Name, Any]:
    """Return the buffers that are not persistent, except those of metrics."""
    saved = nn.Module.state_dict(module)  # the user's own state_dict may leave weights out
    return {
        (f"module.{path}".rstrip("."), name): buffer
        for path, part in module.named_modules()
        if not isinstance(part, Metric)
        for name, buffer in part.named_buffers(recurse=False)
        if f"{path}.{name}".lstrip(".") not in saved
    }


def object_structure(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the shapes and optimizers that a resumed run must build in the same way.

    ``True`` stands for a tensor of any shape.
    """
    state = nn.Module.state_dict(trainer.lightning_module).items()
    tensors = {name: value for name, value in state if isinstance(value, torch.Tensor)}
    # A lazy layer has no shape before its first batch. An observer loads tensors of any shape.
    parts = trainer.lightning_module.named_modules()
    observers = {
        n for n, part in parts if type(part).__module__.startswith("torch.ao.quantization")
    }
    found: dict[str, Any] = {
        name: is_lazy(tensor) or name.rpartition(".")[0] in observers or tuple(tensor.shape)
        for name, tensor in tensors.items()
    }
    # Lightning restores the parameter groups that these callbacks add.
    adds_groups = any(isinstance(c, pl.callbacks.BaseFinetuning) for c in callbacks_of(trainer))
    for i, optimizer in enumerate(trainer.optimizers):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        found[f"optimizer {i}"] = type(optimizer).__qualname__, adds_groups or sizes
    return found


def set_value(module: nn.Module, found: dict[str, Any], name: Name, value: Any) -> None:
    """Set a value that ``tracked_values`` lists, in a module or an object of ``found``.

    Raises:
        KeyError: the object does not exist, or ``tracked_values`` lists no such attribute.
    """
    label, attribute = name
    if label == FLAG:
        module.get_parameter(attribute).requires_grad_(value)
    elif label == GRADIENT:
        parameter = module.get_parameter(attribute)
        parameter.grad = shard_like(value.to(parameter.device), parameter)
    elif isinstance(holder := found[label], dict):
        holder[attribute] = value
    elif is_kept(holder, attribute) and not callable(getattr(type(holder), attribute, None)):
        setattr(holder, attribute, value)
    else:
        raise KeyError(f"no attribute of {label} is restored as {attribute}")


def named_objects(trainer: pl.Trainer) -> dict[int, str]:
    """Return the names, by id, of objects that a checkpoint saves elsewhere or each run builds."""
    module = trainer.lightning_module
    named: list[tuple[str, Any]] = [("trainer", trainer), *tracked_objects(trainer).items()]
    named += [*module.named_modules(), *module.named_parameters(), *module.named_buffers()]
    named += [(f"schedule {i}", c.scheduler) for i, c in enumerate(trainer.lr_scheduler_configs)]
    unsaved = {id(buffer) for buffer in unsaved_buffers(module).values()}
    return {id(value): name for name, value in named if id(value) not in unsaved}
