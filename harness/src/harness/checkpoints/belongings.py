"""Which attributes of an object are its author's, and which are kept by somebody else."""

import argparse
import dis
import io
import logging
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from inspect import getattr_static
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric, SumMetric

from harness.places import Place

LIGHTNING = ("pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics")
MACHINERY = (*LIGHTNING, "harness")
# What shows or records a run, and decides nothing in it.
WATCHING = ("tqdm", "rich", "tensorboard", "wandb", "mlflow", "comet_ml", "matplotlib")
MADE_EMPTY: tuple[type, ...] = (nn.Module, pl.LightningModule, pl.LightningDataModule)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
WITHOUT_ATTRIBUTES = (int, float, complex, str, bytes, tuple, *FUNCTIONS)
# Locks and files stand for something outside; a data set gives the same sample for an index.
SILENT = (
    *(torch.device, types.ModuleType, logging.Logger, logging.Handler, io.IOBase, weakref.ref),
    *(threading.Thread, threading.Event, threading.Condition, threading.local),
    *(type(threading.Lock()), type(threading.RLock())),
    *(Dataset, DataLoader, Sampler),
)


def package(kind: type) -> str:
    """The package that defines a class."""
    return kind.__module__.partition(".")[0]


def class_name(value: Any) -> str:
    """The name of a value's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_silent(value: Any) -> bool:
    """Whether a value is neither kept nor missed."""
    if isinstance(value, SILENT):
        return True
    return package(type(value)) in (*MACHINERY, *WATCHING) and not isinstance(value, nn.Module)


@lru_cache
def inherited(kind: Any) -> frozenset[str]:
    """The attributes of a class's objects that are those of torch, Lightning or the harness.

    Of torch's layers only the private ones: authors change a dropout's rate.
    """
    names: set[str] = set()
    makers: dict[type, Any] = {kind: kind for kind in MADE_EMPTY} | {Metric: SumMetric}
    for own, make in makers.items():
        names |= vars(make()).keys() - {"training"} if issubclass(kind, own) else set()
    for base in kind.__mro__:
        if package(base) in (*MACHINERY, "torch"):
            found = {name for method in vars(base).values() for name, _ in assignments(method)}
            names |= {n for n in found if package(base) != "torch" or n.startswith("_")}
    return frozenset(names)


def assignments(function: Any) -> Iterator[tuple[str, Place]]:
    """The attributes that a method assigns, and where."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    line = 0
    if not isinstance(code, types.CodeType) or dis.opmap["STORE_ATTR"] not in code.co_code[::2]:
        return
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.opname == "STORE_ATTR":
            yield str(instruction.argval), Place(code.co_filename, line, code.co_name)


def mentions(owner: Any, method: str, name: str) -> bool:
    """Whether a method of an owner's class names an attribute, directly."""
    code = getattr(getattr(type(owner), method, None), "__code__", None)
    return code is not None and name in (*code.co_names, *code.co_consts)


def own_attributes(owner: Any) -> dict[str, Any]:
    """The attributes of a module, a data module or a callback that its author has made."""
    kind: Any = type(owner)
    hidden = inherited(kind)
    states = owner.metric_state if isinstance(owner, Metric) else ()
    return {
        name: value
        for name, value in (shared_containers(kind) | vars(owner)).items()
        if name not in hidden and name not in states and not is_method(owner, name, value)
    }


@lru_cache
def shared_containers(kind: Any) -> dict[str, Any]:
    """The lists, dicts and the like that an author's class has for all its objects."""
    bases = [base for base in kind.__mro__[::-1] if package(base) not in (*MACHINERY, "torch")]
    return {
        name: value
        for base in bases
        for name, value in vars(base).items()
        if isinstance(value, (list, dict, set, deque, bytearray)) and not name.startswith("__")
    }


def is_method(owner: Any, name: str, value: Any) -> bool:
    """Whether an attribute stands before a method, as Lightning and the harness put it there."""
    return callable(value) and callable(getattr(type(owner), name, None))


def named_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module and of those in it, by the names that lead to them."""
    for path, part in module.named_modules():
        for name, value in own_attributes(part).items():
            yield f"{path}.{name}".removeprefix("."), value


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of any other object; ``None`` of one that has its values elsewhere."""
    kind = type(value)
    if kind not in NAMESPACES:
        is_built_in = package(kind) in (*sys.stdlib_module_names, "torch", "numpy")
        if is_built_in or isinstance(value, WITHOUT_ATTRIBUTES):
            return None
    slots = [s for base in kind.__mro__ for s in slots_of(base)]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if not slots and not hasattr(value, "__dict__"):
        return None
    return found | getattr(value, "__dict__", {})


def slots_of(kind: type) -> list[str]:
    """The names in a class's ``__slots__``."""
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    members = (types.MemberDescriptorType,)
    return [name for name in names if isinstance(getattr_static(kind, name, None), members)]
