"""The parity check tells of modules that train otherwise on several devices, and costs nothing."""

import gc
import itertools
import os
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from harness.checkpoints.reading import read
from harness.distributed import vote
from harness.parity import gradient_sketches, parity_callback, snapshot
from harness.parity.parity_callback import ParityChecks
from harness.parity.snapshot import MOST_BYTES
from harness.training.train import close_process_group
from tests.conftest import ci, slow
from tests.faults.run_folder import differences, only
from tests.modules import data
from tests.modules.classifiers import Classifier
from tests.modules.kinds import KINDS, OF_PARITY, Kind
from tests.parity.live_bytes import LiveBytes
from tests.strategy_runs import execute, in_processes, outcome, write_conf
from tests.verdicts.cells import PACKAGE, settings_of
from tests.workers.trainer import small_trainer

pytestmark = pytest.mark.filterwarnings("default")  # of what Lightning says of a small Trainer


def found_in(devices: int, kinds: dict[str, Any], folder: Path, **settings: Any) -> Any:
    """The findings of short runs in so many processes, which must be those of all ranks."""

    def train() -> None:
        found, parity_callback.FREE_SECONDS = {}, 60  # cores may be busy
        for name, make in kinds.items():
            torch.manual_seed(0)
            checks, made = ParityChecks(), make()
            module, loaders = made if isinstance(made, tuple) else (made, data.Data("Flowers"))
            loaders = None if hasattr(module, "loaders") else loaders
            how = {"max_steps": 3, "limit_val_batches": 0, "precision": "64-true"} | settings
            small_trainer(devices, checks, **how).fit(module, loaders)
            found[name] = checks.findings
        torch.save(found, folder / f"found_{os.environ.get('LOCAL_RANK', 0)}.pt")
        close_process_group()

    in_processes(devices, train)
    everyone = [torch.load(folder / f"found_{rank}.pt") for rank in range(devices)]
    assert all(found == everyone[0] for found in everyone)
    return everyone[0]


class WithLoss(Classifier):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def training_step(self, batch: Any) -> Any:  # without its number
        return {"loss": self.loss(self, *batch)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


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
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)

        optimizer.step(closure=closure)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def reduced(module: Any, x: Tensor, y: Tensor) -> Tensor:
    """Scales by a number of all samples, which the user adds up."""
    sums = torch.stack([x.square().sum(0).mean(), x.new_tensor(len(x))])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums[0] / sums[1] * F.cross_entropy(module(x), y)


def baseline(module: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(module(x), y, reduction="none")
    before = vars(module).get("baseline", 1.0)
    module.baseline = 0.5 * before + 0.5 * float(losses.detach().mean())
    return (losses - before).square().mean()


def gathered(module: Any, x: Tensor, y: Tensor) -> Tensor:
    mine = module(x)
    return torch.cdist(mine, module.all_gather(mine).flatten(0, -2)).square().mean()


def over_all_ranks(module: Any, x: Tensor, y: Tensor) -> Tensor:
    """Divides its sum by the number of all ranks' samples, as DETR does by that of boxes."""
    number = module.all_gather(torch.tensor(len(x))).sum()
    loss: Tensor = F.cross_entropy(module(x), y, reduction="sum") / number
    return loss


def sum_logged(module: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(module(x), y)
    module.log("train/total", loss * len(x))
    return loss


WEIGHTS = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
LOSSES: dict[str, tuple[str, Any]] = {  # part of the message; "" for none
    "mean": ("", lambda m, x, y: F.cross_entropy(m(x), y)),
    "weight decay in the loss": (
        "",
        lambda m, x, y: m(x).square().mean() + sum(p.square().sum() for p in m.parameters()),
    ),
    "an all-reduce of the user's": ("", reduced),
    "sum": ("is a sum: return sum_over(loss)", lambda m, x, y: m(x).square().sum() / 8),
    "sum over the number of all ranks": ("or return sum_over(loss)", over_all_ranks),
    "class weights": (
        "not over samples: return mean_over(loss, number)",
        lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS),
    ),
    "square of a mean": ("of the whole batch", lambda m, x, y: m(x).mean(0).square().sum()),
    "baseline made in the step": ("each rank has built from its own samples", baseline),
    "gathered without gradients": ("compares samples", gathered),
    "gathered": (
        "Give the DataLoader drop_last=True",
        lambda m, x, y: m.all_gather(m(x), sync_grads=True).flatten(0, -2).square().mean(),
    ),
    "logged sum": ("logs train/total in training", sum_logged),
    "draws": (
        "draws random numbers",
        lambda m, x, y: F.cross_entropy(m(x), y).sqrt() * random.random(),
    ),
    "no loss for some": (
        "Return a loss",
        lambda m, x, y: F.cross_entropy(m(x), y) if len(x) > 2 else None,
    ),
}


@pytest.mark.parametrize("is_manual", [False, *ci(True)])
def test_each_kind_of_loss_is_told_with_its_cure(is_manual: bool, tmp_path: Path) -> None:
    """Losses by hand are averaged before they are compared, which hides their kind."""
    make = ByHand if is_manual else WithLoss
    every = found_in(2, {n: partial(make, loss) for n, (_, loss) in LOSSES.items()}, tmp_path)
    for name, (says, _) in LOSSES.items():
        found = " ".join(every[name].values()).replace("\n", " ")
        assert (says if not is_manual else found) in found, (name, found)
        assert bool(found) == bool(says), (name, found)


OWN_SAMPLES, WHOLE_BATCH = "has built from its own samples", "of the whole batch"
SAID: dict[str, str] = {  # some of kinds.OF_PARITY; all are in the table of verdicts
    "centre moved by a hook (DINO)": OWN_SAMPLES,
    "class weights from a validation": OWN_SAMPLES,
    "LayerDrop drawn before each batch": "",
    "contrastive from a step within an epoch": WHOLE_BATCH,
    "dropout from the second epoch": "draws random numbers",
    "sum added in `backward`": "Add the change to the loss that training_step returns",
    "gradients clamped in hooks": "A hook of a parameter changes the gradient",
    "evaluated by neighbours (k-NN)": "evaluates with state that each rank has built",
    "adapted in validation (Tent)": "evaluates a batch with state from earlier batches",
    "logs zero but for rounding": "",
    "attributes named drop": "",
    "loader made and read in a step": "",
    "metric computed in a step": "",
}


def made(kind: Kind) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    name, _, its_class = kind.model.rpartition(".")
    module = getattr(import_module(f"tests.modules.{name}"), its_class)()
    return module, getattr(data, kind.data)(kind.dataset)


@pytest.mark.ci
def test_state_late_terms_hooks_and_evaluations_are_told_and_the_innocent_are_not(
    tmp_path: Path,
) -> None:
    kinds = {name: partial(made, OF_PARITY[name]) for name in SAID}
    settings = {"max_steps": -1, "max_epochs": 3, "limit_val_batches": 1.0}
    for name, found in found_in(2, kinds, tmp_path, **settings).items():
        sentences = " ".join(found.values()).replace("\n", " ")
        assert SAID[name] in sentences, (name, found)
        assert bool(found) == bool(SAID[name]), (name, found)


def test_one_device_that_accumulates_is_not_told_of_ranks(tmp_path: Path) -> None:
    kinds = {
        n: partial(WithLoss, LOSSES[n][1]) for n in ("mean", "class weights", "square of a mean")
    }
    every = found_in(1, kinds, tmp_path, accumulate_grad_batches=2)
    assert not every.pop("mean")
    for found in every.values():
        assert "with trainer.accumulate_grad_batches=2 and without" in found["different"]
        assert not {"rank", "ddp", "dp"} & {*found["different"].replace(",", " ").split()}


class Holding(Classifier):
    """Holds something that a step moves."""

    def __init__(self, held: Any, move: Any) -> None:
        super().__init__()
        self.held, self.move = held, move

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.move(self.held)
        return super().training_step(batch, batch_idx)


HELD: dict[str, tuple[str, Any, Any]] = {
    "an iterator": ("which cannot be restored", lambda: iter(range(99)), next),
    "an open file": (
        "which cannot be restored",
        Path(os.devnull).open,
        lambda file: file.read(),
    ),
    "large state": (
        "a step may change more than 64 MiB",
        lambda: torch.zeros(MOST_BYTES // 4 + 1),
        lambda tensor: tensor.add_(1),
    ),
}


def test_what_cannot_be_set_back_is_not_checked_in_one_line(tmp_path: Path) -> None:
    kinds = {n: partial(holding, make, move) for n, (_, make, move) in HELD.items()}
    for name, found in found_in(2, kinds, tmp_path).items():
        assert [*found] == ["unchecked"], name
        assert HELD[name][0] in found["unchecked"], name


def holding(make: Any, move: Any) -> Holding:
    return Holding(make(), move)


class OwnGroup(Classifier):
    """Calls a collective with its own process group, and counts the calls."""

    def on_fit_start(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.num_calls = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        dist.all_reduce(self.num_calls.add_(1), group=self.group)
        return super().training_step(batch, batch_idx)


class FailsOnRankOne(Classifier):
    """One rank fails in its part while the other one waits in a collective."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if dist.is_initialized() and not self.has_failed and self.global_rank == 1:
            raise RuntimeError("out of memory, for example")
        if dist.is_initialized():
            dist.all_reduce(torch.ones(3))
        return super().training_step(batch, batch_idx)

    has_failed = False

    def on_before_batch_transfer(self, batch: Any, _: int) -> Any:
        self.has_failed = len(batch[0]) > 3  # a part of a check has fewer samples
        return batch


def test_a_rank_that_fails_or_meets_others_ends_no_run(tmp_path: Path) -> None:
    kinds = {"its own process group": OwnGroup, "for example": FailsOnRankOne}
    for says, found in found_in(2, kinds, tmp_path).items():
        assert [*found] == ["unchecked"]
        assert says in found["unchecked"]


@dataclass(slots=True)
class Slots:
    number: int


class OneSlot:
    """Its only name is a text, and not a tuple of one."""

    __slots__ = "__number"

    def __init__(self) -> None:
        self.__number = 0

    def count(self) -> int:
        self.__number += 1
        return self.__number


class Pair(tuple[Any, ...]):
    """One that refuses its length, as of an e3nn ``Irrep``."""

    def __len__(self) -> int:
        raise NotImplementedError


class Everything(Classifier):
    """Changes whatever a step can change."""

    of_class = list[int]()  # noqa: RUF012
    num_of_class = 0

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(6, 3).double().requires_grad_(False)
        self.register_buffer("queue", torch.zeros(4, 6, dtype=torch.float64))
        self.plain, self.nested = torch.zeros(3), {"a": [0, {"b": 1.0}]}
        self.generator, self.counts = random.Random(0), [0]
        counts = self.counts
        self.pair = Pair(([0], 1))
        self.counter, self.slots, self.slot = Counter("a"), Slots(0), OneSlot()
        self.bytes, self.moving, self.delta = bytearray(), torch.zeros(2), torch.zeros(2)
        self.handle = self.net.register_forward_hook(lambda *_: counts.append(len(counts)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        with torch.no_grad():
            self.queue[batch_idx % 4] = x[0]
            self.plain += 1
        self.slow.weight.data.add_(0.1)
        self.plain = self.plain * 1.5
        self.nested["a"][1]["b"] += self.generator.random()  # type: ignore[index]
        self.nested[str(batch_idx)] = []
        self.counter["steps"] += 1
        self.slots.number += 1
        self.slot.count()
        self.pair[0].append(batch_idx)
        self.bytes += b"a"
        self.moving.data = self.moving.data * 0.9 + 0.1
        self.delta.requires_grad_()
        (self.delta * 2).sum().backward()  # type: ignore[no-untyped-call]
        self.trainer.datamodule.num_steps = 1 + vars(self.trainer.datamodule).get("num_steps", 0)  # type: ignore[attr-defined]
        Everything.num_of_class += 1
        self.of_class.append(batch_idx)
        STEPS[0] += 1
        self.out = self(x)  # keeps its graph
        self.log("train/x", x.mean())
        if batch_idx == 1:
            self.optimizers().param_groups[0]["lr"] *= 0.5  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx) + self.slow(x).mean()


STEPS = [0]


def state(trainer: pl.Trainer, module: Any) -> Any:
    optimizer = trainer.optimizers[0]
    return {
        "weights": {n: t.clone() for n, t in module.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "plain": [module.plain.clone(), module.nested, module.counts, module.generator.random()],
        "others": [module.counter, module.slots.number, bytes(module.bytes), module.moving],
        "slot": [module.slot.count(), module.pair[0]],
        "further": [module.delta.grad, trainer.datamodule.num_steps],  # type: ignore[attr-defined]
        "class": [module.num_of_class, [*module.of_class], STEPS[0]],
        "draws": [random.random(), torch.rand(2)],
        "logged": {n: float(v) for n, v in trainer.logged_metrics.items()},
        "out": module.out.detach(),
    }


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_leaves_no_trace_of_the_check(accumulated: int, tmp_path: Path) -> None:
    def train(is_on: bool) -> None:
        pl.seed_everything(0, verbose=False)
        module, checks = Everything(), ParityChecks(is_on)
        trainer = small_trainer(
            3 - accumulated,
            checks,
            max_epochs=2,
            precision="64-true",
            accumulate_grad_batches=accumulated,
            log_every_n_steps=1,
        )
        trainer.fit(module, data.Data("Flowers"))
        assert "unchecked" not in checks.findings
        if trainer.is_global_zero:
            torch.save(state(trainer, module), tmp_path / f"{is_on}.pt")
        close_process_group()

    for is_on in (True, False):
        in_processes(3 - accumulated, train, is_on)
    one, two = (torch.load(tmp_path / f"{is_on}.pt", weights_only=False) for is_on in (True, False))
    assert not differences(one, two)


TELLING: list[Any] = [("class weights", "ddp(2)")]
TELLING += ci(("LBFGS", "ddp(2)"), ("queue written by forward (MoCo)", "ddp(2)"))


@pytest.mark.parametrize(
    ("kind", "strategy"),
    TELLING + slow(*itertools.product(KINDS | OF_PARITY, ("ddp(2)", "dp(2)"))),
)
def test_a_run_with_the_check_is_the_run_without_it(
    kind: str, strategy: str, tmp_path: Path
) -> None:
    one: Kind = (KINDS | OF_PARITY)[kind]
    folder = f"_target_: {PACKAGE}.data.{one.data}\ndataset: {one.dataset}\n"
    words = write_conf(tmp_path, data=folder, model=f"_target_: {PACKAGE}.{one.model}\n")
    words += [*one.words, *settings_of(one, strategy)]
    found = []
    for is_on in ("true", "false"):
        more = [f"parity_check={is_on}", f"name=check_{is_on}", "logger.tensorboard=null"]
        status, said = execute([*words, *more], strategy, tmp_path)
        run = tmp_path / f"check_{is_on}"
        found.append(left_by(only(run)) if status == 0 else said)
    assert isinstance(found[0], dict)
    assert not differences(*found)


def left_by(run_dir: Path) -> dict[str, Any]:
    """Return the results of a run, without paths and times."""
    last = read(run_dir / "checkpoints" / "last.ckpt")
    names = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "epoch", "global_step")
    kept = last["changed_attributes"]
    return outcome(run_dir) | {n: last[n] for n in names} | {n: kept[n] for n in ("each", "apart")}


class Large(pl.LightningModule):
    """20 million parameters, and few activations."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.kind, width = optimizer, 3162
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        kinds = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
        momentum = {"momentum": 0.9} if self.kind == "momentum" else {}
        return kinds.get(self.kind, torch.optim.SGD)(self.parameters(), lr=1e-3, **momentum)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(160, 64, generator=generator)
        return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32)


def measure(optimizer: str, devices: int, path: Path) -> None:
    """Save the peaks of steps and of checks, and what checks leave behind, in bytes."""
    gc.disable()
    live, checks, copied = LiveBytes(), ParityChecks(), [0]
    found: dict[str, list[int]] = {"steps": [], "checks": [], "left": [], "copied": []}
    run, to_host = checks._run, snapshot.to_host

    def counted(tensor: Tensor) -> Tensor:
        live.is_paused = True
        result = to_host(tensor)
        live.is_paused = False
        copied[0] += result.untyped_storage().nbytes()
        return result

    def measured(*args: Any) -> None:
        before, copied[0] = live.now, 0
        live.restart_peak()
        run(*args)
        found["checks"].append(live.restart_peak())
        found["left"].append(live.now - before)
        found["copied"].append(copied[0])

    class Steps(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            found["steps"].append(live.restart_peak())

    snapshot.to_host = gradient_sketches.to_host = counted
    vars(checks)["_run"] = measured
    module = Large(optimizer)
    for tensor in (WEIGHTS, *module.parameters()):  # the first is a global of this file
        live.count(tensor.untyped_storage())
    ddp = DDPStrategy(gradient_as_bucket_view=True)  # as conf/strategy/ddp.yaml
    settings = {"strategy": ddp} if devices > 1 else {"accumulate_grad_batches": 2}
    with live:
        small_trainer(devices, checks, Steps(), max_steps=4, limit_val_batches=0, **settings).fit(
            module
        )
    assert not checks.findings
    torch.save(found, path)
    close_process_group()


@pytest.mark.parametrize(
    ("optimizer", "devices"),
    [("SGD", 2), *slow(*itertools.product(("AdamW", "momentum", "SGD"), (1, 2)))],
)
def test_a_check_takes_no_more_memory_than_a_step_and_leaves_none(
    optimizer: str, devices: int, tmp_path: Path
) -> None:
    in_processes(devices, measure, optimizer, devices, tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt")
    first, *later = found["checks"]
    assert len(later) >= 1
    assert first <= max(found["steps"])
    assert max(later) <= max(found["steps"][1:])
    assert set(found["left"]) == {0}
    assert max(found["copied"]) < 2**20


class Watched(Dataset[Any]):
    """Records the ranks that read."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        assert get_worker_info() is not None, "read in the training process"
        return torch.randn(6, dtype=torch.float64), index % 3


class WithWorkers(Classifier):
    loaders = True

    def train_dataloader(self) -> Any:
        return DataLoader(Watched(), batch_size=8, num_workers=1)


def test_a_worker_reads_the_samples_where_the_loader_has_workers(tmp_path: Path) -> None:
    assert not found_in(2, {"": WithWorkers}, tmp_path)[""]


class Streaming(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(6).double(), torch.tensor(0))] * 16)

    def read_part(self, part: int, num_parts: int) -> None:
        """Every rank reads the same."""


class OfStream(Classifier):
    loaders = True

    def train_dataloader(self) -> Any:
        return DataLoader(Streaming(), batch_size=8)


class Pairs(Classifier):
    loaders = True
    size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(data.Flowers(16), batch_size=self.size)


class RaisesLong(Classifier):
    """Raises an error of 5,000 characters for the few samples of a check."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) < 4:
            raise ValueError("long " * 1000)
        return super().training_step(batch, batch_idx)


def test_what_cannot_be_checked_names_the_program_that_compares_runs(tmp_path: Path) -> None:
    kinds = {"from a stream": OfStream, "fewer than 3 samples": Pairs, "long [...]": RaisesLong}
    for says, found in found_in(2, kinds, tmp_path).items():
        assert says in found["unchecked"]
        assert "prove.py" in found["unchecked"]


class DropsLater(Classifier):
    """Drops something from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def on_train_epoch_start(self) -> None:
        self.drop.p = 0.1 * self.current_epoch


def test_a_change_that_a_planned_check_sees_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vote, "MOST_STEPS_BETWEEN", 1)  # as with slow steps
    monkeypatch.setattr(parity_callback, "FREE_SECONDS", 60)

    def train() -> None:
        checks, steps = ParityChecks(), list[int]()
        run = checks._run

        def noted(*args: Any) -> None:
            steps.append(checks.num_steps - 1)
            run(*args)

        vars(checks)["_run"] = noted
        how = {"max_steps": 32, "limit_val_batches": 0, "precision": "64-true"}
        small_trainer(2, checks, **how).fit(DropsLater(), data.Data("Flowers"))
        torch.save(steps, tmp_path / f"steps_{os.environ['LOCAL_RANK']}.pt")
        close_process_group()

    in_processes(2, train)
    planned = {0, 1, 2, 4, 8, 16} | {*range(0, 32, 4)} | {*range(0, 32, 5)}  # epochs of 5 steps
    assert torch.load(tmp_path / "steps_0.pt") == sorted(planned)


class Four(WithLoss):
    loaders = True

    def train_dataloader(self) -> Any:
        return DataLoader(data.Flowers(16), batch_size=4)


def test_four_ranks_with_a_sample_each_are_checked(tmp_path: Path) -> None:
    """Two ranks' parts count, and the others have weight 0."""
    kinds = {name: partial(Four, LOSSES[name][1]) for name in ("mean", "class weights")}
    every = found_in(4, kinds, tmp_path)
    assert not every["mean"]
    assert "in parts of 2 and 1" in every["class weights"]["different"]
