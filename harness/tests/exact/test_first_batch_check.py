"""What the first-batch check finds in every kind of module is what several processes make of it."""

import random
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from harness.exact.first_batch import in_child
from harness.exact.first_batch_check import Findings, check_first_batch
from tests.modules import data
from tests.modules.classifiers import Classifier
from tests.modules.kinds import KINDS, Kind
from tests.verdicts.table import read
from tests.workers.trainer import small_trainer

pytestmark = pytest.mark.filterwarnings("default")  # of what Lightning says of a small Trainer
TABLE = read()
# Told by other lines: statistics of BatchNorm, and what a hook logs at an epoch's end.
BY_OTHERS = {"BatchNorm", "collected in training"}


class Checking(pl.Callback):
    """Checks before the first step, after all hooks, in a run of one process."""

    def __init__(self, has_child: bool, **settings: Any) -> None:
        self.has_child, self.settings, self.found = has_child, settings, Findings()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy

        def called(*_: Any) -> None:
            loaders = trainer.train_dataloader
            check = partial(check_first_batch, pl_module, loaders, **self.settings)
            self.found = in_child(check) if self.has_child else check()

        strategy.on_train_batch_start = called


def findings(
    module: pl.LightningModule,
    loaders: Any = None,
    precision: Any = "64-true",
    has_child: bool = False,
    **settings: Any,
) -> Findings:
    """What is told; without a child, as on a GPU."""
    checking = Checking(has_child, **settings)
    trainer = short_trainer(precision, checking)
    loaders = data.Data("Flowers") if loaders is None else loaders
    trainer.fit(module, datamodule=loaders or None)
    return checking.found


def short_trainer(precision: Any, *callbacks: pl.Callback, **more: Any) -> pl.Trainer:
    settings: dict[str, Any] = {"max_steps": 1, "limit_val_batches": 0, "precision": precision}
    return small_trainer(1, *callbacks, **settings | more)


def made(kind: Kind) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    name, _, its_class = kind.model.rpartition(".")
    words = dict(w[7:].split("=") for w in kind.words if w.startswith("+model."))
    settings = {key: yaml.safe_load(value) for key, value in words.items()}
    torch.manual_seed(0)
    module = getattr(import_module(f"tests.modules.{name}"), its_class)(**settings)
    return module, getattr(data, kind.data)(kind.dataset)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_told_exactly_where_two_processes_train_another_one(kind: str) -> None:
    found = findings(*made(KINDS[kind]))
    verdict = TABLE["module", kind, "ddp(2)"].verdict
    is_another = verdict in ("told", "silent") and kind not in BY_OTHERS
    assert bool(found) == is_another, found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("kind", "is_another"),
    [
        ("classifier", False),
        ("masked language, `mean_over`", False),
        ("contrastive, gathered (SimCLR)", False),
        ("padded to `total_length`", False),
        ("masked language", True),
        ("contrastive (InfoNCE)", True),
        ("bank in a list", True),
    ],
)
def test_it_is_as_right_in_other_precisions(kind: str, is_another: bool, precision: str) -> None:
    module, loaders = made(KINDS[kind])
    loaders.on_before_batch_transfer = lambda batch, _: apply_to_collection(  # type: ignore[method-assign]
        batch, Tensor, lambda one: one.float() if one.is_floating_point() else one
    )
    assert ("different" in findings(module, loaders, precision)) == is_another


@pytest.mark.parametrize(
    ("kind", "is_another"),
    [
        ("classifier", False),
        ("masked language, `mean_over`", False),
        ("contrastive, gathered (SimCLR)", True),
    ],
)
def test_batches_that_are_accumulated_do_not_see_each_other(kind: str, is_another: bool) -> None:
    module, loaders = made(KINDS[kind])
    checking = Checking(has_child=False)
    trainer = short_trainer("64-true", checking, accumulate_grad_batches=2)
    trainer.fit(module, datamodule=loaders)
    assert ("different" in checking.found) == is_another, checking.found


class Watched(Classifier):
    """Closes over itself: a copy's forward fills lists of the original."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.net[0].register_forward_hook(lambda *call: self.features.append(call[2]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Watched.seen += 1
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * torch.cat(self.features).square().sum() / len(batch[0])

    def on_train_batch_start(self, *_: Any) -> None:
        self.features.clear()


def test_a_run_is_the_same_with_the_check_and_without() -> None:
    states = []
    for settings in ({}, None):
        torch.manual_seed(0)
        Watched.seen, module = 0, Watched()
        if settings is None:
            short_trainer("64-true").fit(module, data.Data("Flowers"))
        else:
            assert "different" not in findings(module)
        assert Watched.seen == 1
        states.append([*module.state_dict().values(), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def gathered(module: Any, x: Tensor, y: Tensor, sync_grads: bool = True) -> Tensor:
    mine = module(x)
    everyone = module.all_gather(mine, sync_grads=sync_grads).flatten(0, -2)
    return torch.cdist(mine, everyone).square().mean()


def reduced(module: Any, x: Tensor, y: Tensor) -> Tensor:
    """Scales by a number of all samples, which the author adds up."""
    scale = x.square().sum(0).mean() / len(x)
    if dist.is_initialized():
        dist.all_reduce(scale)
        scale = scale / dist.get_world_size()
    return scale * F.cross_entropy(module(x), y)


def baseline(module: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(module(x), y, reduction="none")
    before = vars(module).get("baseline", 1.0)
    module.baseline = 0.5 * before + 0.5 * float(losses.detach().mean())
    return (losses - before).square().mean()


LOSSES: dict[str, tuple[bool, Any]] = {  # whether two processes train another module
    "weight decay in the loss": (
        False,
        lambda m, x, y: m(x).square().mean() + sum(p.square().sum() for p in m.parameters()),
    ),
    "gathered negatives": (False, gathered),
    "an all-reduce of the author's": (False, reduced),
    "gathered without gradients": (True, lambda m, x, y: gathered(m, x, y, False)),
    "sum by a constant": (True, lambda m, x, y: m(x).square().sum() / 8),
    "log of a mean": (True, lambda m, x, y: m(x).square().mean().log()),
    "baseline made in the step": (True, baseline),
}


class WithLoss(Classifier):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self, *batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("is_manual", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_a_batch_are_told_and_means_over_samples_are_not(
    name: str, is_manual: bool
) -> None:
    is_another, loss = LOSSES[name]
    torch.manual_seed(0)
    module = (ByHand if is_manual else WithLoss)(loss)
    assert ("different" in findings(module, data.DropsLast("Flowers"))) == is_another


class ByHand(WithLoss):
    """With a closure, as toolboxes write it."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self, *batch))
        optimizer.step()


class SumLogged(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/total", loss * len(x))
        return loss


class SometimesNothing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if len(batch[0]) > 2 else None


def test_logged_values_and_steps_without_a_loss_are_told() -> None:
    assert "logs train/total in training" in findings(SumLogged())["logged"]
    assert "Return a loss" in findings(SometimesNothing())["different"]


class Drawing(Classifier):
    """Draws in its step, like a diffusion or masked model."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        keep = torch.rand(x.shape, dtype=x.dtype) > 0.2
        moved = x * keep + 0.1 * torch.randn_like(x) * torch.rand(len(x), 1, dtype=x.dtype)
        return self.loss(F.cross_entropy(self(moved), y, reduction="none"), torch.randperm(len(y)))


def test_a_step_that_draws_is_told_and_not_compared() -> None:
    for loss in (
        lambda losses, order: losses[order].mean(),
        lambda losses, _: losses.mean().sqrt() * random.random(),
    ):
        found = findings(Drawing(loss))
        assert {*found} == {"random"}
        assert "Its loss was not compared" in found["random"]


STEPS = [0]  # of all modules


class Counting(Classifier):
    """Counts its steps where no copy of it has a number of its own."""

    of_class: ClassVar = [0]

    def __init__(self) -> None:
        super().__init__()
        self.calls = calls = [0]

        def count(*_: Any) -> None:
            calls[0] += 1

        self.net.register_forward_hook(count)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        STEPS[0] += 1
        self.of_class[0] += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("has_child", [True, False])
def test_nothing_of_the_check_is_left_in_globals_classes_and_closures(has_child: bool) -> None:
    """On a GPU there is no child."""
    STEPS[0] = Counting.of_class[0] = 0
    module = Counting()
    findings(module, has_child=has_child)
    assert (STEPS, module.of_class, module.calls) == ([1], [1], [1])  # the step of the run


class Collecting(Classifier):
    """Reads in its step what a hook has collected, and its loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        kept: list[Tensor] = []
        self.collected = lambda: kept
        self.net.register_forward_hook(lambda _, __, output: kept.append(output))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.collected().clear()
        loss = super().training_step(batch, batch_idx)
        return loss + self.collected()[0].square().mean()


def test_a_hook_that_collects_in_a_closure_is_right() -> None:
    assert findings(Collecting()) == {}


class RankZeroWaits(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 0 and self.trainer.world_size > 1:
            dist.barrier()
        return super().training_step(batch, batch_idx)


def test_a_barrier_of_one_process_alone_is_told() -> None:
    assert "wait for each other" in findings(RankZeroWaits())["different"]


class Stretched(nn.Module):
    """Divides by the largest value of the call: not row by row."""

    def __init__(self, net: nn.Module, num_samples: int) -> None:
        super().__init__()
        self.net, self.num_samples = net, num_samples

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(part) for part in x.split(self.num_samples - 2)])


def test_split_calls_are_compared_with_whole_ones() -> None:
    def split(copied: Any, num_samples: int) -> None:
        copied.net = Stretched(copied.net, num_samples)

    def split_wrongly(copied: Any, num_samples: int) -> None:
        copied.net = nn.Sequential(copied.net, nn.Softmax(0))

    assert not findings(Classifier(), num_parts=1, prepare=split)
    assert (
        "splits its calls"
        in (findings(Classifier(), num_parts=1, prepare=split_wrongly)["different"])
    )


class Streaming(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(6).double(), torch.tensor(0))] * 16)


class OfStream(data.Data):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Streaming(), batch_size=8)


def test_what_cannot_be_checked_names_the_program_that_compares_runs() -> None:
    found = findings(Classifier(), OfStream("Flowers"))
    assert "prove.py" in found["unchecked"]
