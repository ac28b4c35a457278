"""Modules, callbacks and data whose Python attributes decide what a run comes to."""

import copy
import enum
import itertools
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from small.data import Synthetic
from torch import Tensor, nn
from torchmetrics import MeanMetric


class Module(pl.LightningModule):
    """Scales its loss by what ``look`` has gathered of the losses before, and logs it."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.head = nn.Linear(8, 10)
        self.make()

    def make(self) -> None:
        """Make the attributes."""

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        """What the attributes come to, now that they know of another loss."""
        return 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.backbone(inputs)).relu()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        scale = torch.as_tensor(self.look(loss.detach(), batch_idx), dtype=torch.float32)
        self.log("state", scale, on_step=True, on_epoch=True)
        return loss * (1 + 0.5 * scale.tanh())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class StepOutputs(Module):
    """The idiom of Lightning's documentation."""

    def make(self) -> None:
        self.training_step_outputs: list[Tensor] = []

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        self.training_step_outputs.append(loss)
        return torch.stack(self.training_step_outputs).sum()

    def on_train_epoch_end(self) -> None:
        self.log("fit/loss", torch.stack(self.training_step_outputs).mean())
        self.training_step_outputs.clear()


class Numbers(Module):
    def make(self) -> None:
        self.best, self.beta, self.num_seen, self.text = float("inf"), 1.0, 0, ""
        self.is_warm, self.last = False, None

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        before = (self.last or 0.0) + len(self.text) + self.is_warm
        self.best = min(self.best, loss.item())
        self.beta *= 0.9
        self.num_seen += 3
        self.is_warm, self.last, self.text = self.num_seen > 12, loss.item(), "ab" * batch_idx
        return before + self.best * self.beta + 0.01 * self.num_seen


class Containers(Module):
    def make(self) -> None:
        self.recent: deque[Any] = deque(maxlen=3)
        self.seen: set[int] = set()
        self.by_kind: Any = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.ordered: OrderedDict[str, Any] = OrderedDict(a=1.0, b=(0.0, [0.0]))
        self.pair: tuple[Any, ...] = (0.0, [])

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        value = loss.item()
        self.recent.append(value)
        self.seen.add(int(1e6 * value))
        self.by_kind[batch_idx % 2, "kind"].append(value)
        self.counts[f"{batch_idx}"] += 1
        self.ordered["a"] += value
        self.ordered.move_to_end("a")
        self.pair[1].append(value)
        self.pair = (self.pair[0] + value, self.pair[1])
        first = next(iter(self.ordered.values()))
        sums = [sum(v) for v in self.by_kind.values()]
        found = len(self.seen) + self.counts.total() + sum(self.pair[1]) + self.pair[0]
        return 0.1 * (
            sum(self.recent) + found + sum(sums) + (first[0] if type(first) is tuple else 1)
        )


class MemoryBank(Module):
    """Tensors in dicts, one that is bound anew in every step, an array, a buffer of no file."""

    def make(self) -> None:
        self.bank: dict[Any, Tensor] = {"sum": torch.zeros(3)}
        self.centre = self.start = torch.zeros(())
        self.replay, self.place = np.zeros((6, 2), np.float32), np.int64(0)
        self.register_buffer("running", torch.zeros(2), persistent=False)

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        self.bank["sum"] += loss
        self.bank[batch_idx] = self.backbone[1].weight[:2, :3].clone() * loss  # has a graph
        self.bank[batch_idx] = self.bank[batch_idx].detach()
        self.centre = 0.9 * self.centre + 0.1 * loss
        self.running = 0.5 * self.running + loss
        self.replay[self.place % 6] = [loss.item(), batch_idx]
        self.place += 1
        arrays = self.replay.mean() + 0.01 * self.place + self.running.sum()
        return self.centre + self.start + sum(t.sum() for t in self.bank.values()) + arrays


class Generators(Module):
    def make(self) -> None:
        self.torch_rng = torch.Generator().manual_seed(1)
        self.rng, self.old = np.random.default_rng(1), np.random.RandomState(1)
        self.python = {"rng": random.Random(1)}

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        drawn = torch.rand((), generator=self.torch_rng) + self.rng.random()
        return drawn + self.old.standard_normal() + self.python["rng"].random()


class AverageMeter:
    """The class that everybody writes."""

    def __init__(self) -> None:
        self.sum, self.count, self.parts = 0.0, 0, [0.0]

    def update(self, value: float) -> float:
        self.sum, self.count = self.sum + value, self.count + 1
        self.parts.append(value)
        return self.sum / self.count + sum(self.parts)


@dataclass
class History:
    values: list[float] = field(default_factory=list)
    parent: Any = None


class Point(NamedTuple):
    x: float
    y: float


class Phase(enum.Enum):
    FIRST = 0.1
    SECOND = 0.7


class Objects(Module):
    shared: ClassVar[list[float]] = []

    def make(self) -> None:
        self.meter = self.same_meter = AverageMeter()
        self.meters: dict[str, AverageMeter] = {}
        self.history, self.phase = History(parent=self), Phase.FIRST
        self.point = Point(0.0, 0.0)
        self.shared.clear()

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        value = loss.item()
        self.meters.setdefault(str(batch_idx), AverageMeter()).update(value)
        self.history.values.append(value)
        self.phase = Phase.SECOND if self.global_step % 4 > 1 else Phase.FIRST
        self.point = Point(self.point.y, value)
        self.shared.append(value)
        sums = [self.point.x, self.phase.value, self.same_meter.update(value)]
        assert self.history.parent is self
        assert self.meter is self.same_meter
        sums += [m.update(0.1) for m in self.meters.values()] + self.history.values
        return 0.05 * (sum(sums) + sum(self.shared))


class Shadow:
    """An average of the weights, with a ``state_dict`` and no ``nn.Module``."""

    def __init__(self, module: nn.Module) -> None:
        self.shadow = {k: v.detach().clone() for k, v in module.named_parameters()}
        self.parameters = list(module.parameters())

    def update(self) -> Tensor:
        for old, new in zip(self.shadow.values(), self.parameters, strict=True):
            old.lerp_(new.detach(), 0.5)
        return sum(t.square().sum() for t in self.shadow.values())

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.shadow[name].copy_(value)


class AnchorOfStart(Module):
    """An average, and the weights that a run begins with, which are others in a resumed run."""

    def on_fit_start(self) -> None:
        self.anchor = copy.deepcopy(dict(self.head.named_parameters()))
        self.average = Shadow(self.head)

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        apart = [(self.anchor[k] - p).square().sum() for k, p in self.head.named_parameters()]
        return sum(apart).detach() + self.average.update() / 10


class Modes(Module):
    """Freezes and unfreezes, and sets modes and rates of layers, as training goes on."""

    def make(self) -> None:
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        self.norm.train(self.global_step % 3 != 1)
        self.norm.momentum *= 0.9
        self.drop.p = 0.05 * (1 + self.global_step % 5)
        self.head.bias.requires_grad_(self.global_step % 4 < 2)
        return 0.0


class Harder(Module):
    """Sets how hard the data are, in every step."""

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        self.trainer.datamodule.noise_level += 0.01  # type: ignore[attr-defined]
        return 0.0


HABITS = (
    StepOutputs, Numbers, Containers, MemoryBank, Generators, Objects, AnchorOfStart,
    Modes, Harder,
)  # fmt: skip


class Everything(*HABITS):  # type: ignore[misc]
    """Has all of these habits; what each has come to is logged under its name."""

    def make(self) -> None:
        for habit in HABITS:
            habit.make(self)

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        found = {habit.__name__: habit.look(self, loss, batch_idx) for habit in HABITS}
        states = {name: torch.as_tensor(value).float() for name, value in found.items()}
        self.log_dict({f"state/{name}": value.detach() for name, value in states.items()})
        return sum(states.values()) / 10

    def on_train_epoch_start(self) -> None:
        Modes.on_train_epoch_start(self)


class Recorder(pl.Callback):
    """A user's callback without ``state_dict``, which tells the data set of the epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.mean, self.rate = MeanMetric(), 0.0
        self.lock = threading.Lock()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.rate = 0.1 * trainer.current_epoch
        pl_module.drop.p = 0.2 + self.rate
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        data.datasets["train"].shift = self.rate

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(outputs["loss"].item())
        self.mean.update(outputs["loss"].detach())
        with torch.no_grad():
            pl_module.head.bias.mul_(1 - 0.01 * sum(self.losses) * self.rate)
        pl_module.log("callback", self.mean.compute())


class Data(Synthetic):
    """Is made harder from outside."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.noise_level = 0.0

    def make_dataset(self, split: str) -> Any:
        return Shifted(super().make_dataset(split), self)


class MovingData(Data):
    """Changes while a batch is moved."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.noise_level += 0.01
        return batch


class Shifted(torch.utils.data.Dataset[Any]):
    def __init__(self, dataset: Any, data: Data) -> None:
        self.dataset, self.data, self.shift = dataset, data, 0.0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        x, y = self.dataset.__getitems__([index])
        return x[0] + self.shift + self.data.noise_level, y[0]


class CannotBeKept(Module):
    """Holds what no checkpoint can, beside what nobody misses."""

    def make(self) -> None:
        self.function: Any = F.relu
        self.lock, self.path, self.large = threading.Lock(), Path("a"), torch.zeros(())

    def on_train_start(self) -> None:
        self.stream = itertools.count()
        self.record = np.zeros(1, [("a", np.float32)])
        self.nested: Any = defaultdict(lambda: defaultdict(lambda: 0))

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        self.nested["a"]["b"] += 1
        self.record["a"] += 1
        self.function = lambda x: x + 1
        self.lock = threading.Lock()
        self.large = torch.ones(2**19)  # 2 MB
        return 0.1 * next(self.stream)


class PerProcess(Module):
    """What one process has seen, what all of them know, and what hooks at the start have found."""

    def make(self) -> None:
        self.losses: list[float] = []
        self.num_steps, self.world, self.rng = 0, 0, random.Random()
        self.offset = 0

    def on_train_start(self) -> None:
        self.world, self.offset = self.trainer.world_size, self.global_rank + 1
        self.rng.seed(self.global_rank)

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        self.losses.append(loss.item() + self.rng.random())
        self.num_steps += 1
        return 0.1 * sum(self.losses) / len(self.losses) + 0.01 * self.num_steps + self.world
