"""Modules, callbacks and data whose Python attributes decide what a run comes to."""

import copy
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from small.data import Synthetic
from torch import Tensor, nn
from torch.ao.quantization import PerChannelMinMaxObserver
from torchmetrics import MeanMetric
from torchmetrics.wrappers import MetricTracker, MinMaxMetric, Running

from tests.faults.plain_module import PlainModule


class Module(PlainModule):
    """Scales its loss by what ``look`` has gathered of the losses before."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.make()

    def make(self) -> None:
        """Make the attributes."""

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        """Update the attributes by another loss, and return a number that depends on them."""
        return 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        scale = torch.as_tensor(self.look(loss.detach(), batch_idx), dtype=torch.float32)
        return loss * (1 + 0.5 * scale.tanh())


class AverageMeter:
    """The class that everybody writes."""

    def __init__(self) -> None:
        self.sum, self.values = 0.0, list[float]()

    def add(self, value: float) -> float:
        self.values.append(value)
        self.sum += value
        return self.sum


HABITS = (
    *("best", "beta", "text", "last", "fuse", "recent", "by_kind", "counts", "ordered", "bank"),
    *("centre", "start", "decaying", "replay", "place", "step_outputs", "anchor", "history"),
    *("same_history", "groups", "of_class"),
)


class CountingSGD(torch.optim.SGD):
    """Keeps a number in an attribute, which no state_dict has."""

    num_calls = 0

    def step(self, closure: Any = None) -> Any:
        self.num_calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.num_calls % 3)
        return super().step(closure)


def total(value: Any) -> float:
    """A number that depends on all of a plain value, and on its order."""
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    if isinstance(value, (list, tuple, set, deque)):
        return sum(0.9**i * total(part) for i, part in enumerate(value))
    if isinstance(value, str) or value is None:
        return float(len(value or ""))
    return float(torch.as_tensor(value, dtype=torch.float64).sum())


class Everything(Module):
    """Has attributes of all kinds that users keep; its loss depends on each of them."""

    of_class: ClassVar[list[float]] = []

    def make(self) -> None:
        kinds = {"window": deque([1.0]), "kinds": Counter("a"), "sizes": {1: [0.0]}}
        self.save_hyperparameters({"temperature": 1.0, "by_kind": defaultdict(list), **kinds})
        self.step_outputs: list[Tensor] = []  # the idiom of Lightning's documentation
        self.best, self.beta, self.text, self.last = float("inf"), 1.0, "", None
        self.recent: deque[Any] = deque(maxlen=3)
        self.by_kind: Any = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.ordered: OrderedDict[str, Any] = OrderedDict(a=1.0, b=(0.0, [0.0]))
        self.bank: dict[Any, Tensor] = {"sum": torch.zeros(3)}
        self.centre = self.start = torch.zeros(())  # the first one is bound again in every step
        self.replay, self.place = np.zeros((6, 2), np.float32), np.int64(0)
        self.register_buffer("decaying", torch.zeros(2), persistent=False)
        self.of_class.clear()
        self.fuse = 0
        self.history = self.same_history = [0.0]
        self.groups: dict[str, Any] = {"all": self.history}
        self.meter = AverageMeter()
        self.meters = {"train": self.meter}
        self.net.requires_grad_(False)

    def on_fit_start(self) -> None:  # the weights that a run begins with; others in a resumed one
        self.anchor = {k: p.detach().clone() for k, p in self.head.named_parameters()}
        self.fuse = 3  # training brings it back to what __init__ has set

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.net.requires_grad_(True)

    def change(self, loss: Tensor, batch_idx: int) -> None:
        value, self.fuse = loss.item(), max(0, self.fuse - 1)
        self.best, self.beta, self.text = min(self.best, value), self.beta * 0.9, "ab" * batch_idx
        self.last = value
        self.hparams["temperature"] *= 0.9
        self.hparams["kinds"]["b"] += 1
        lists = [self.hparams["window"], self.hparams["by_kind"]["a"], self.hparams["sizes"][1]]
        lists += [self.recent, self.by_kind[batch_idx % 2, "kind"], self.history, self.of_class]
        for each in lists:
            each.append(value)
        self.counts[f"{batch_idx}"] += 1
        self.ordered["a"] += value
        self.ordered.move_to_end("a")
        self.step_outputs.append(loss)
        self.bank["sum"] += loss
        self.bank[batch_idx] = (self.net[1].weight[:2, :3].clone() * loss).detach()
        self.centre = 0.9 * self.centre + 0.1 * loss
        self.decaying = 0.5 * self.decaying + loss
        self.replay[self.place % 6] = [value, batch_idx]
        self.place += 1
        assert self.same_history is self.history
        assert self.groups["all"] is self.history

    def modes(self) -> None:
        self.net[2].train(self.global_step % 3 != 1)
        self.net[2].momentum *= 0.9
        self.net[4].p = 0.05 * (1 + self.global_step % 5)
        self.head.bias.requires_grad_(self.global_step % 4 < 2)
        self.trainer.datamodule.noise_level += 0.01  # type: ignore[attr-defined]

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        self.modes()
        self.change(loss, batch_idx)
        habits = [*(getattr(self, name) for name in HABITS), *self.hparams.values()]
        habits.append(self.meters["train"].add(loss.item()))
        return sum(total(value) % 1 for value in habits) / len(habits)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("fit/loss", torch.stack(self.step_outputs).mean())
        self.step_outputs.clear()

    def configure_optimizers(self) -> Any:
        return CountingSGD(self.parameters(), lr=0.1, momentum=0.9)


class Wrapped(PlainModule):
    """Has torchmetrics' wrappers, which keep numbers outside of their states."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.least = MinMaxMetric(MeanMetric())
        self.last_three = Running(MeanMetric(), 3)
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        self.total = MeanMetric()  # over all epochs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.total.update(loss.detach())
        return loss * (1 + self.last_three(loss.detach()) + self.total.compute())

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        loss = F.cross_entropy(self.head(self.net(batch[0])), batch[1]) * (1 + self.current_epoch)
        self.least.update(loss)
        self.tracker.update(loss)

    def on_validation_epoch_end(self) -> None:
        self.log("val/min", self.least.compute()["min"])
        self.least.reset()
        best, step = self.tracker.best_metric(return_step=True)
        self.log_dict(
            {
                "val/best": best,
                "val/best_step": float(step),
                "val/running": self.last_three.compute(),
            }
        )


class Recorder(pl.Callback):
    """A user's callback without ``state_dict``, which tells the data set of the epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rate = 0.0
        self.lock = threading.Lock()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.rate = 0.1 * trainer.current_epoch
        pl_module.net[4].p = 0.2 + self.rate
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        data.datasets["train"].shift = self.rate

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(outputs["loss"].item())
        with torch.no_grad():
            pl_module.head.bias.mul_(1 - 0.01 * sum(self.losses) * self.rate)


class CountingBatches(torch.utils.data.BatchSampler):
    """Counts its epochs in a number, and puts the last batch first in every other one."""

    num_epochs = 0
    epochs: list[int] | None = None

    def __iter__(self) -> Any:
        self.num_epochs += 1
        if self.epochs is not None:
            self.epochs.append(1)
        batches = list(super().__iter__())
        return iter(batches[self.num_epochs % 2 :] + batches[: self.num_epochs % 2])


class Data(Synthetic):
    """Is made harder from outside, and has a batch sampler of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.noise_level = 0.0

    def make_dataset(self, split: str) -> Any:
        return Shifted(super().make_dataset(split), self)

    def train_dataloader(self) -> Any:
        dataset: Any = super().train_dataloader().dataset
        order = torch.utils.data.RandomSampler(dataset)
        self.batches = CountingBatches(order, self.batch_size, drop_last=False)
        return torch.utils.data.DataLoader(dataset, batch_sampler=self.batches)


class MovingData(Data):
    """Changes while a batch is moved, and its batch sampler has a list."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        self.batches.epochs = []
        return loader

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


class Holder:
    """Holds an object of the user's."""

    def __init__(self, meter: AverageMeter) -> None:
        self.meter = meter


class CannotBeKept(Module):
    """Holds an object that no checkpoint can save, beside one that no run needs."""

    def make(self) -> None:
        self.function: Any = F.relu
        self.lock, self.meters = threading.Lock(), [AverageMeter()]
        self.rng, self.unused = torch.Generator().manual_seed(1), AverageMeter()
        self.holder, self.tally = Holder(AverageMeter()), AverageMeter()

    def on_fit_start(self) -> None:
        self.teacher = [copy.deepcopy(self.head)]
        self.helper = AverageMeter()

    def on_train_start(self) -> None:
        self.stream = iter(range(1000))
        self.nested: Any = defaultdict(lambda: 0)

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        self.nested["a"] += 1
        self.meters[0].sum += 1
        self.holder.meter.sum += 1
        self.tally.add(1)
        self.function = lambda x: x + 1
        self.lock = threading.Lock()
        return 0.1 * next(self.stream) + torch.rand((), generator=self.rng)


class Exchanges(Module):
    """Adds a layer and exchanges the optimizer; lazy layers and observers are none of it."""

    def make(self) -> None:
        self.late, self.observer = nn.LazyLinear(2), PerChannelMinMaxObserver()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.late(self.observer(torch.ones(1, 3)))
        super().validation_step(batch, batch_idx)

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        if self.global_step == 2:
            self.extra = nn.Linear(2, 2)
            self.trainer.strategy.optimizers = [
                torch.optim.RMSprop(self.parameters(), momentum=0.9)
            ]
        return 0.0


class PerProcess(Module):
    """Values of one rank, values of all ranks, and values that hooks set at the start."""

    def make(self) -> None:
        self.losses: list[float] = []
        self.both: list[int] = []
        self.kinds: Any = defaultdict(list)
        self.texts: set[str] = set()
        self.all: dict[str, Any] = {"both": self.both, "losses": self.losses}
        self.num_steps, self.world, self.offset = 0, 0, 0

    def on_train_start(self) -> None:
        self.world, self.offset = self.trainer.world_size, self.global_rank + 1

    def look(self, loss: Tensor, batch_idx: int) -> Any:
        self.losses.append(loss.item())
        self.both.append(1)
        self.kinds["a"].append(np.float32(1))
        self.texts |= {f"text {batch_idx}"}
        assert self.all["losses"] is self.losses
        assert self.all["both"] is self.both
        self.num_steps += 1
        return 0.01 * (self.num_steps + len(self.both) + len(self.kinds["a"]) + len(self.texts))
