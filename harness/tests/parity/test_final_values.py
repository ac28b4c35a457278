"""Each rank gets each final value once, and all readers have the same values."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from harness.checkpoints.lookup import by_step
from harness.compat import final_values
from harness.loggers.metrics_table import read
from tests.conftest import ci, train_command
from tests.faults.fork_server import command
from tests.modules.classifiers import Classifier
from tests.modules.data import Flowers
from tests.strategy_runs import write_conf
from tests.workers.trainer import small_trainer


def plateau(module: pl.LightningModule, monitor: str) -> dict[str, Any]:
    """An optimizer, and a schedule that goes by a logged value."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": monitor}}


class Logs(Classifier):
    """Logs at steps, at some steps, at the end of epochs and of validations, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.train_loss(*batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/last", loss)
        if self.global_step % 3 == 0:
            self.log("train/rare", loss, logger=False)
        self.metric.update(loss, weight=len(batch[1]))
        self.log("train/metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train/end", self.trainer.callback_metrics["train/loss"] + 1)

    def on_validation_epoch_end(self) -> None:
        self.log("val/end", self.trainer.callback_metrics["val/loss"] + 1)

    def configure_optimizers(self) -> Any:
        return plateau(self, "val/end")


class Flowery(pl.LightningDataModule):
    """Five batches of training, the last of five samples, and four of validation."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Flowers(37), batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Flowers(29), batch_size=8)


class Hears(pl.Callback):
    """Writes the values of ``on_values``, and those that Lightning has after a validation.

    Args:
        deadly_step: in which process 0 is killed, once.
    """

    def __init__(self, deadly_step: int | None = None) -> None:
        self.deadly_step = deadly_step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        died = Path(trainer.default_root_dir, "died")
        if (
            trainer.global_step == self.deadly_step
            and not died.exists()
            and not trainer.global_rank
        ):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_values(
        self, trainer: pl.Trainer, stage: str, epoch: int, step: int, values: dict[str, float]
    ) -> None:
        event = [[stage, epoch, step], values]
        with Path(trainer.default_root_dir, f"rank_{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        seen = {n: v.item() for n, v in trainer.callback_metrics.items() if n.startswith("val/")}
        self.on_values(trainer, "read", trainer.current_epoch, trainer.global_step, seen)


SHORT = "trainer.max_epochs=3 trainer.log_every_n_steps=2 trainer.precision=64-true mode=min"
SHORT += " callbacks=early_stopping objective=val/end test=false trainer.enable_progress_bar=false"


def words(folder: Path) -> list[str]:
    target = f"_target_: {__name__}"
    groups = {"model": f"{target}.Logs\n", "data": f"{target}.Flowery\n"}
    return [
        *write_conf(folder, **groups),
        *SHORT.split(),
        f"+callbacks.hears._target_={__name__}.Hears",
    ]


def told(run_dir: Path, rank: int = 0) -> dict[tuple[Any, ...], dict[str, float]]:
    """Return the last values of each moment."""
    lines = (run_dir / f"rank_{rank}.jsonl").read_text().splitlines()
    return {tuple(moment): values for moment, values in map(json.loads, lines)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The run of one process, with a setting."""

    @cache
    def run(setting: str) -> Any:
        folder = tmp_path_factory.mktemp("one")
        return train_command(folder, *words(folder), *setting.split())

    return run


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        ("", ""),
        *ci(
            ("trainer.val_check_interval=2", ""),
            (
                "trainer.val_check_interval=2",
                "trainer.accumulate_grad_batches=2 trainer.val_check_interval=4",
            ),
        ),
    ],
)
def test_values_are_told_once_and_every_reader_has_those_of_one_process(
    setting: str, more: str, alone: Callable[[str], Any], tmp_path: Path
) -> None:
    ddp = ["strategy=ddp", "trainer.devices=2"]
    run_dir = train_command(tmp_path, *words(tmp_path), *setting.split(), *more.split(), *ddp)
    found, expected = told(run_dir), told(alone(setting))
    assert found == told(run_dir, rank=1)
    assert [*found] == [*expected]
    for moment, values in expected.items():
        assert found[moment] == pytest.approx(values, rel=1e-6), moment
    check_readers(run_dir, found)
    # Also of the last batch, which no row has.
    results, wanted = (
        json.loads((one / "results.json").read_text()) for one in (run_dir, alone(setting))
    )
    assert results == pytest.approx(wanted, rel=1e-6)
    having = [
        stage
        for (stage, *_), one in expected.items()
        if one.get("train/last") == wanted["train/last"]
    ]
    assert having == ["train_epoch"]


def check_readers(run_dir: Path, found: dict[tuple[Any, ...], dict[str, float]]) -> None:
    """Compare what each reader has made of the values."""
    moments = Counter(stage for stage, *_ in found)
    validations = [values for (stage, *_), values in found.items() if stage == "validate"]
    assert (moments["train_step"], moments["train_epoch"]) == (7, 3)
    assert moments["validate"] == moments["read"]
    seen = [values for (stage, *_), values in found.items() if stage == "read"]
    assert seen == validations
    assert all(set(values) == {"val/loss", "val/acc", "val/end"} for values in validations)
    rare = [step for (stage, _, step), values in found.items() if "train/rare" in values]
    assert rare == [1, 3, 7, 9, 13]  # the rows behind steps 0, 3, 6, 9 and 12: none has it again

    _, table = read(run_dir / "metrics.csv")  # the metrics table, and with it every logger
    of = {"val/end": "validate", "train/end": "train_epoch", "train/loss_step": "train_step"}
    for name, stage in of.items():
        rows = [float(row[name]) for row in table if row[name]]
        assert rows == [values[name] for (one, *_), values in found.items() if one == stage]

    best = min(values["val/end"] for values in validations)
    record = json.loads((run_dir / "record.json").read_text())
    assert record["best"] == pytest.approx(best, rel=1e-6)
    results = json.loads((run_dir / "results.json").read_text())
    assert results["val/end"] == validations[-1]["val/end"]
    saved: Any = torch.load(by_step(run_dir / "checkpoints")[-1], weights_only=True)
    (stopper,) = [v for k, v in saved["callbacks"].items() if k.startswith("EarlyStopping")]
    assert float(stopper["best_score"]) == best
    of_epochs = {epoch: v["val/end"] for (one, epoch, _), v in found.items() if one == "validate"}
    assert saved["lr_schedulers"][0]["best"] == min(of_epochs.values())

    lines = re.findall(r"epoch_lines: (epoch .*)", (run_dir / "run.log").read_text())
    assert len(["train/loss" in line for line in lines if "step" not in line]) == 3
    numbers = dict.fromkeys(one[1] for line in lines if (one := re.search(r"val/end (\S+)", line)))
    assert [*numbers] == [f"{values['val/end']:.3f}" for values in validations]


@pytest.mark.ci
def test_values_of_a_resumed_run_are_those_of_one_that_was_never_killed(
    alone: Callable[[str], Any], tmp_path: Path
) -> None:
    ddp = ["strategy=ddp", "trainer.devices=2"]
    chosen = [*words(tmp_path), *ddp, "trainer.val_check_interval=2", "checkpoint.every_n_steps=3"]
    dies = "+callbacks.hears.deadly_step=8"
    assert command("train.py", *chosen, dies, f"output_dir={tmp_path}").returncode
    (run_dir,) = (tmp_path / "default").iterdir()
    assert (run_dir / "died").exists()
    resumed = command("train.py", f"resume={run_dir}")
    assert resumed.returncode == 0, resumed.stderr
    found, expected = told(run_dir), told(alone("trainer.val_check_interval=2"))
    assert found == told(run_dir, rank=1)
    assert {*found} == {*expected}
    for moment, values in expected.items():
        assert found[moment] == pytest.approx(values, rel=1e-6), moment
    check_readers(run_dir, dict(sorted(found.items(), key=lambda item: [*expected].index(item[0]))))


class OnHost(Tensor):
    """Return the tensors that were copied to the host."""


class Copies(TorchFunctionMode):
    """Counts copies to the host, and what they hold, as if all else were on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = list[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.cpu:
            self.sizes.append(args[0].numel())
            return result.as_subclass(OnHost)
        return result


class Many(Classifier):
    """Logs ten values at each step, and five in a validation, some of them for the bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.train_loss(batch[0].float(), batch[1])
        for i in range(10):
            self.log(f"train/{i}", loss + i, prog_bar=i % 2 == 0)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for i in range(5):
            self.log(f"val/{i}", batch[0].float().mean() + i, prog_bar=True)


@pytest.mark.filterwarnings("ignore")  # what Lightning says of a Trainer
def test_a_row_and_the_end_of_an_epoch_cost_one_copy_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_values, "is_on_host", lambda value: isinstance(value, OnHost))
    trainer = small_trainer(1, max_epochs=2, log_every_n_steps=2, num_sanity_val_steps=0)
    with Copies() as copies:
        trainer.fit(Many(), Flowery())
    sizes = Counter(copies.sizes)
    assert (sizes[10], sizes[5]) == (6, 2)  # rows, an epoch's last step, and validations
