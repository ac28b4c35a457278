"""What the first-batch check finds in every kind of module is what several processes make of it."""

import random
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor

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
    """Checks before the first step, after all hooks, in a run of one process or a fork of it."""

    def __init__(self, in_fork: bool = False, **settings: Any) -> None:
        self.in_fork, self.settings, self.found = in_fork, settings, Findings()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy

        def called(*_: Any) -> None:
            check = partial(check_first_batch, pl_module, trainer.train_dataloader, **self.settings)
            self.found = in_child(check) if self.in_fork else check()

        strategy.on_train_batch_start = called


def findings(
    module: pl.LightningModule, loaders: Any = None, run: Any = None, **settings: Any
) -> Findings:
    checking = Checking(**settings)
    train(module, checking, loaders=loaders, **(run or {}))
    return checking.found


def train(
    module: pl.LightningModule, *callbacks: pl.Callback, loaders: Any = None, **settings: Any
) -> None:
    settings = {"max_steps": 1, "limit_val_batches": 0, "precision": "64-true"} | settings
    if loaders is None and not is_overridden("train_dataloader", module):
        loaders = data.Data("Flowers")
    small_trainer(1, *callbacks, **settings).fit(module, loaders)


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


def as_float(one: Tensor) -> Tensor:
    return one.float() if one.is_floating_point() else one


@pytest.mark.parametrize(
    "run",
    [{"precision": "32-true"}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}],
    ids=str,
)
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
def test_it_is_as_right_in_other_runs(kind: str, is_another: bool, run: dict[str, Any]) -> None:
    """But for batches that are accumulated: none of these sees what another one gathers."""
    module, loaders = made(KINDS[kind])
    if "precision" in run:
        loaders.on_before_batch_transfer = lambda batch, _: apply_to_collection(  # type: ignore[method-assign]
            batch, Tensor, as_float
        )
    else:
        is_another |= "gathered" in kind
    assert ("different" in findings(module, loaders, run=run)) == is_another


STEPS = [0]  # of all modules
READS: dict[str, list[int]] = {"batches": []}  # deeper than what is looked at on a GPU


class Rows(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.num_rows = 0

    def log_metrics(self, *_: Any, **__: Any) -> None:
        self.num_rows += 1


class Counting(Classifier):
    """Counts its steps where no copy of it has a number of its own, and reads what hooks keep."""

    num_steps, of_class = 0, list[int]()

    def __init__(self) -> None:
        super().__init__()
        kept: list[Tensor] = []
        self.kept, self.features = lambda: kept, list[Tensor]()
        calls = [0]
        self.calls = lambda: calls

        def count(*_: Any) -> None:
            calls[0] += 1

        self.net.register_forward_hook(count)
        self.net[0].register_forward_hook(lambda *call: self.features.append(call[2]))
        self.net[1].register_forward_hook(lambda *call: kept.append(call[2]))

    def train_dataloader(self) -> Any:
        return data.Data("Flowers").train_dataloader()

    def on_train_start(self) -> None:
        self.trainer.logger = self.rows = Rows()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        STEPS[0] += 1
        READS["batches"].append(batch_idx)
        Counting.num_steps += 1
        self.logger.log_metrics({})
        self.of_class.append(1)
        self.features.clear()
        self.kept().clear()
        loss = super().training_step(batch, batch_idx)
        return loss + self.features[0].square().mean() + self.kept()[0].square().mean()


def counted(train_it: Any) -> list[Tensor]:
    """The weights and the next draws after a step, which must have been the only one."""
    torch.manual_seed(0)
    STEPS[0], Counting.num_steps, Counting.of_class[:], READS["batches"] = 0, 0, [], []
    module = Counting()
    assert not train_it(module)
    assert (STEPS, module.num_steps, module.of_class, module.calls()) == ([1], 1, [1], [1])
    assert module.rows.num_rows == 1
    return [*module.state_dict().values(), torch.rand(3)]


@pytest.mark.parametrize("in_fork", [True, False])
def test_a_run_is_the_same_with_the_check_and_without(in_fork: bool) -> None:
    """Also in globals, classes and closures; a child leaves nothing at all."""
    checked = counted(partial(findings, in_fork=in_fork))
    assert not in_fork or READS == {"batches": [0]}
    assert all(map(torch.equal, checked, counted(train)))


def gathered(module: Any, x: Tensor, y: Tensor) -> Tensor:
    mine = module(x)
    everyone = module.all_gather(mine).flatten(0, -2)  # without sync_grads=True
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
    "an all-reduce of the author's": (False, reduced),
    "gathered without gradients": (True, gathered),
    "baseline made in the step": (True, baseline),
    "sum by a constant": (True, lambda m, x, y: m(x).square().sum() / 8),
    "log of a mean": (True, lambda m, x, y: m(x).square().mean().log()),
}


class WithLoss(Classifier):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def training_step(self, batch: Any) -> Any:  # without its number
        return {"loss": self.loss(self, *batch)}

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
    assert not is_manual or module.schedule.last_epoch == 1  # the step of the run alone


class ByHand(WithLoss):
    """With a closure, as toolboxes write it."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> None:
            optimizer.zero_grad()
            self.manual_backward(self.loss(self, *batch))

        optimizer.step(closure=closure)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [self.schedule]


def sum_logged(module: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(module(x), y)
    module.log("train/total", loss * len(x))
    return loss


def sometimes_nothing(module: Any, x: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(module(x), y) if len(x) > 2 else None


def test_logged_values_and_steps_without_a_loss_are_told() -> None:
    assert "logs train/total in training" in findings(WithLoss(sum_logged))["logged"]
    assert "Return a loss" in findings(WithLoss(sometimes_nothing))["different"]


def test_a_step_that_draws_is_told_and_not_compared() -> None:
    for module in (
        made(KINDS["mixup in the step"])[0],
        WithLoss(lambda m, x, y: F.cross_entropy(m(x), y).sqrt() * random.random()),
    ):
        found = findings(module)
        assert {*found} == {"random"}
        assert "Its loss was not compared" in found["random"]


def split(module: Any, num_samples: int) -> None:
    net = module.net
    module.forward = lambda x: torch.cat([net(part) for part in x.split(num_samples - 2)])


def split_wrongly(module: Any, num_samples: int) -> None:
    net = module.net
    module.forward = lambda x: net(x).softmax(0)


def test_split_calls_are_compared_with_whole_ones() -> None:
    assert not findings(Classifier(), num_parts=1, prepare=split)
    found = findings(Classifier(), num_parts=1, prepare=split_wrongly)
    assert "splits its calls" in found["different"]


class Streaming(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(6).double(), torch.tensor(0))] * 16)


class OfStream(data.Data):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Streaming(), batch_size=8)


def test_what_cannot_be_checked_names_the_program_that_compares_runs() -> None:
    found = findings(Classifier(), OfStream("Flowers"))
    assert "prove.py" in found["unchecked"]
