"""What a copy of a module meets in place of a run: a trainer, a strategy, optimizers, a group.

They have a run's numbers, and nothing happens by them: nothing is logged, no weight changes, no
real process hears of it. Whatever combines processes asks ``everyones`` for what all copies have.
"""

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor, nn

Everyones = Callable[[Any], list[Any]]  # what all copies have, of what this one has
PLAIN = (bool, int, float, str)
CONTAINERS = (list, dict, set)
MOST_ELEMENTS = 1000  # of a variable of a file or a class; a larger one is a table that is read


def nothing(*_: Any, **__: Any) -> None:
    """Take any arguments and do nothing."""


class Trainer:
    """A trainer of which a copy reads numbers; its methods are not there.

    Args:
        trainer: of the run.
        rank: of the copy.
        size: the number of copies.
        everyones: see the module's text.
    """

    def __init__(self, trainer: pl.Trainer, rank: int, size: int, everyones: Everyones) -> None:
        self._trainer = trainer
        self.world_size, self.num_nodes, self.accumulate_grad_batches = size, 1, 1
        self.global_rank = self.local_rank = rank
        self.is_global_zero, self.training = rank == 0, True
        self.strategy = Strategy(trainer.strategy.root_device, rank, size, everyones)
        self.logger = DummyLogger()
        self.loggers, self.callback_metrics = [self.logger], dict(trainer.callback_metrics)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if inspect.ismethod(value):
            raise AttributeError(f"trainer.{name} is not there for the first-batch check")
        return value


class Strategy:
    """The collectives of a strategy, between copies."""

    def __init__(self, device: Any, rank: int, size: int, everyones: Everyones) -> None:
        self.root_device, self.global_rank, self.world_size = device, rank, size
        self.everyones = everyones
        self.distributed_sampler_kwargs = {"num_replicas": size, "rank": rank}
        self.barrier = lambda *_, **__: everyones(None)

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Add up, or average."""
        every = torch.stack(self.everyones(tensor))
        return every.mean(0) if str(reduce_op).lower() in ("mean", "avg") else every.sum(0)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack, (...) to (copies, ...)."""
        if self.world_size == 1:
            return tensor
        return torch.stack(self.everyones(tensor if sync_grads else tensor.detach()))


class Optimizer:
    """Notes the gradients that it is to step with, and leaves the weights.

    Args:
        optimizer: of the run.
        names: of the module's parameters, by id.
        named: parameters of the copy.
        note: is given what it steps.
    """

    def __init__(
        self, optimizer: Any, names: dict[int, str], named: Any, note: Callable[[Any], None]
    ) -> None:
        self.param_groups = [
            group | {"params": [named[names[id(p)]] for p in group["params"] if id(p) in names]}
            for group in optimizer.param_groups
        ]
        own = {id(p) for group in self.param_groups for p in group["params"]}
        self.named = {name: p for name, p in named.items() if id(p) in own}
        self.state: dict[Any, Any] = {}
        self.optimizer, self.defaults, self.note = self, dict(optimizer.defaults), note

    def step(self, closure: Any = None, **_: Any) -> None:
        """Note the gradients."""
        if closure is not None:
            closure()
        self.note(self.named)

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Forget the gradients."""
        for parameter in self.named.values():
            parameter.grad = None


def methods_of_a_run(
    optimizers: list[Optimizer], num_schedules: int, logged: dict[str, Any]
) -> dict[str, Any]:
    """What a LightningModule's methods are for a copy, by name."""
    schedules = [SimpleNamespace(step=nothing, get_last_lr=lambda: [0.0])] * num_schedules

    def log(name: str, value: Any, *_: Any, **settings: Any) -> None:
        if isinstance(value, (int, float)) or type(value) is Tensor:
            how = settings.get("reduce_fx", "mean")
            how = str(getattr(how, "__name__", how))
            logged[name] = float(value), how, settings.get("batch_size")

    return {
        "log": log,
        "optimizers": lambda *_, **__: optimizers[0] if len(optimizers) == 1 else optimizers,
        "lr_schedulers": lambda: schedules[0] if len(schedules) == 1 else schedules or None,
        "toggled_optimizer": lambda *_, **__: contextlib.nullcontext(),
        **dict.fromkeys(
            ("print", "clip_gradients", "toggle_optimizer", "untoggle_optimizer"), nothing
        ),
    }


@contextlib.contextmanager
def simulated_group(size: int, rank: Callable[[], int], everyones: Everyones) -> Iterator[None]:
    """Let ``torch.distributed`` be that of the copies; anything else of it raises."""

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *_: Any, **__: Any) -> None:
        every = torch.stack(everyones(tensor.detach().clone()))
        name = str(op).rpartition(".")[2]
        combine: Any = {"SUM": torch.sum, "AVG": torch.mean, "MAX": torch.amax, "MIN": torch.amin}
        with torch.no_grad():
            tensor.copy_(combine[name](every, 0))

    def all_gather(tensors: list[Tensor], tensor: Tensor, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            for into, one in zip(tensors, everyones(tensor.detach()), strict=True):
                into.copy_(one)

    stand_ins: dict[str, Any] = {
        "is_initialized": lambda: size > 1,
        "get_world_size": lambda *_, **__: size,
        "get_rank": lambda *_, **__: rank(),
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "barrier": lambda *_, **__: everyones(None),
    }
    world, dist.group.WORLD = dist.group.WORLD, None
    try:
        with patch.multiple(dist, **stand_ins):
            yield
    finally:
        dist.group.WORLD = world


class Remembered:
    """What copies share with a module, to be put back.

    Containers that are its attributes or that its hooks close over; numbers, texts and small
    containers that are attributes of its classes, or variables of the files that define these.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts = [(part, dict(vars(part))) for part in module.modules()]
        attributes = [value for _, held in self.parts for value in held.values()]
        hooks = [hook for value in attributes if isinstance(value, dict) for hook in value.values()]
        cells = [cell for hook in hooks for cell in getattr(hook, "__closure__", None) or ()]
        classes = {type(part) for part, _ in self.parts}
        owners = [*classes, *{sys.modules[kind.__module__] for kind in classes}]
        own = [(o, {k: v for k, v in vars(o).items() if k[:2] != "__"}) for o in owners]
        self.owners = [
            (owner, {k: v for k, v in values.items() if type(v) in PLAIN}) for owner, values in own
        ]
        shared = [v for _, of_one in own for v in of_one.values() if type(v) in CONTAINERS]
        shared = [value for value in shared if len(value) <= MOST_ELEMENTS]
        shared += [*attributes, *(cell.cell_contents for cell in cells)]
        self.containers = list({id(v): v for v in shared if type(v) in CONTAINERS}.values())
        self.gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        self.first = self.contents()

    def contents(self) -> list[Any]:
        """Copies of the containers as they are."""
        return [copy.copy(one) for one in self.containers]

    def fill(self, contents: list[Any]) -> None:
        """Put contents into the containers."""
        for value, before in zip(self.containers, contents, strict=True):
            if isinstance(value, list):
                value[:] = before
            else:
                value.clear()
                value.update(before)

    def put_back(self) -> None:
        """Leave everything as it was at first."""
        self.fill(self.first)
        for part, attributes in self.parts:
            vars(part).clear()
            vars(part).update(attributes)
        for owner, numbers in self.owners:
            for name in [n for n, number in numbers.items() if vars(owner).get(n) is not number]:
                setattr(owner, name, numbers[name])
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
