"""How full and how busy the GPUs of a run are: NVML and the counts of torch are simulated."""

import csv
import json
import logging
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from harness.loggers.metrics_table import MetricsTable
from harness.monitoring import gpu_use, throughput
from harness.monitoring.gpu_use import GpuSampler, GpuUse, gpus_of, of_all
from harness.strategies.dp import DataParallelStrategy
from harness.training import summary
from tests.devices.fake_nvml import GIB, FakeGpu, FakeNvml
from tests.monitoring.test_throughput import SlowData, SlowModule, quiet
from tests.workers.trainer import small_trainer

CUDA = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two GPUs that torch numbers the other way round; NVML is asked a thousand times a second."""
    fake = FakeNvml([FakeGpu(free=60, busy=20), FakeGpu(free=10, busy=90)])
    uuids = [fake.nvmlDeviceGetUUID(index).removeprefix("GPU-") for index in (1, 0)]
    reserved = [40 * GIB, 8 * GIB]

    def properties(device: torch.device) -> Any:
        return SimpleNamespace(uuid=uuids[device.index], total_memory=80 * GIB)

    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved[device.index])
    monkeypatch.setattr(gpu_use, "SECONDS_BETWEEN", 0.001)
    return fake


def sampled(sampler: GpuSampler) -> GpuUse:
    """Return the use after some samples."""
    end = time.monotonic() + 20
    while sampler.seen[1] < 10 and sampler.thread.is_alive() and time.monotonic() < end:
        time.sleep(0.001)
    sampler.stop()
    sampler.thread.join(20)
    assert not sampler.thread.is_alive()
    return sampler.use()


def test_a_gpu_is_found_by_its_uuid(fake: FakeNvml) -> None:
    use = sampled(GpuSampler(CUDA[:1]))
    assert use.busy == pytest.approx(0.9)
    assert str(use) == "40.0 of 80.0 GiB at peak, busy 90% of the time"
    assert use.other_bytes == 30 * GIB
    assert fake.num_open == 0


def test_of_all_gpus_the_fullest_and_the_mean_of_the_others_count(fake: FakeNvml) -> None:
    one, two = (sampled(GpuSampler([device])) for device in CUDA)
    assert of_all([two, one]).peak_bytes == 40 * GIB
    both = sampled(GpuSampler(CUDA))
    assert both.busy == pytest.approx(0.55)
    assert both.peak_bytes == 40 * GIB
    equal = [GpuUse(1, 10, busy_sum=2.0, num_samples=4), GpuUse(2, 10, busy_sum=1.0, num_samples=4)]
    assert of_all(equal).busy == 3 / 8
    later = GpuUse(2, 10, busy_sum=5.0, num_samples=8)
    assert later.since(equal[1]).busy == 1.0


def test_a_rank_samples_its_own_gpus_which_are_all_of_a_node_under_dp() -> None:
    for strategy, expected in (
        (DDPStrategy(parallel_devices=CUDA, cluster_environment=LightningEnvironment()), CUDA[:1]),
        (DataParallelStrategy(parallel_devices=CUDA), CUDA),
        (SingleDeviceStrategy("cpu"), []),
    ):
        trainer: Any = SimpleNamespace(strategy=strategy)
        assert gpus_of(trainer) == expected


@pytest.mark.parametrize("what", ["no library", "lost", "no utilisation", "no package"])
def test_what_nvml_does_not_know_is_left_out(
    what: str, fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, gpu_use.log.name)
    if what == "no library":
        fake.error = fake.NVML_ERROR_LIBRARY_NOT_FOUND
    elif what == "lost":
        fake.gpus[1].lost = True
    elif what == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        fake.gpus[1].memory_unknown = True
    use = sampled(GpuSampler(CUDA[:1]))
    assert str(use) == "40.0 of 80.0 GiB at peak"
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_a_batch_four_times_as_large_must_fit_beside_all_others() -> None:
    assert GpuUse(15 * GIB, 80 * GIB).fits_larger_batch()
    assert not GpuUse(20 * GIB, 80 * GIB).fits_larger_batch()
    assert not GpuUse(15 * GIB, 80 * GIB, other_bytes=21 * GIB).fits_larger_batch()
    assert not GpuUse(0, 80 * GIB).fits_larger_batch()


class Busy(pl.Callback):
    """Wait in each epoch until there are samples; fail in the second if asked to."""

    def __init__(self, watch: throughput.Throughput, fails: bool = False) -> None:
        self.watch, self.fails, self.monitored = watch, fails, list[str]()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.fails and trainer.current_epoch:
            raise RuntimeError("planted")
        sampler, end = self.watch.gpus, time.monotonic() + 20
        assert sampler is not None
        number = sampler.seen[1]
        while sampler.seen[1] <= number + 1 and time.monotonic() < end:
            time.sleep(0.001)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.monitored = [*trainer.callback_metrics]


@quiet
def test_each_epoch_logs_the_use_and_nothing_may_be_monitored(
    fake: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(throughput, "gpus_of", lambda trainer: CUDA)
    caplog.set_level(logging.INFO, throughput.log.name)
    watch = throughput.Throughput()
    busy, table = Busy(watch), MetricsTable(tmp_path / "metrics.csv")
    trainer = small_trainer(1, watch, busy, max_epochs=2, logger=table)
    trainer.fit(SlowModule(lambda: None), SlowData(lambda: None))
    with table.path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["gpu/busy"]]
    assert [(row["step"], row["gpu/memory_gib"]) for row in rows] == [("8", "40.0"), ("16", "40.0")]
    assert all(float(row["gpu/busy"]) == pytest.approx(0.55) for row in rows)
    assert not [name for name in busy.monitored if name.startswith("gpu")]
    of_epochs = [text for text in caplog.messages if text.startswith("Epoch ")]
    assert len(of_epochs) == 2
    assert "GPU 40.0 of 80.0 GiB at peak, busy 55% of the time" in of_epochs[1]
    summary.finish(trainer, OmegaConf.create({"run_dir": str(tmp_path)}), {})
    row = r"GPU +40\.0 of 80\.0 GiB at peak, busy 55% of the time$"
    assert re.search(row, capsys.readouterr().out, re.M)
    watch.gpu_use = GpuUse(8 * GIB, 80 * GIB)
    summary.finish(trainer, OmegaConf.create({"run_dir": str(tmp_path)}), {})
    larger = "GPU +8.0 of 80.0 GiB at peak; a data.batch_size 4 times as large would fit$"
    assert re.search(larger, capsys.readouterr().out, re.M)
    results = json.loads((tmp_path / "record.json").read_text())
    assert results["gpu_gib"] == 8.0
    assert results["gpu_busy"] == 0.55  # of the first call
    assert watch.gpus is not None
    watch.gpus.thread.join(20)
    assert not watch.gpus.thread.is_alive()


@quiet
def test_a_run_that_fails_samples_no_more(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "gpus_of", lambda trainer: CUDA)
    watch = throughput.Throughput()
    with pytest.raises(RuntimeError, match="planted"):
        small_trainer(1, watch, Busy(watch, fails=True), max_epochs=2).fit(
            SlowModule(lambda: None), SlowData(lambda: None)
        )
    assert watch.gpus is not None
    watch.gpus.thread.join(20)
    assert not watch.gpus.thread.is_alive()
