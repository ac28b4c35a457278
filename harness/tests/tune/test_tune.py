"""tune takes the overrides of train.py, writes nothing, and prints overrides to paste."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.tune import search, trials
from harness.tune.__main__ import main
from harness.tune.trials import Steps
from tests.conftest import ROOT
from tests.faults.fork_server import command
from tests.strategy_runs import write_conf

DATA = "_target_: tests.tune.modules.Measures\nbatch_size: 16\nnum_workers: 0\nseed: 0\n"
Tune = Callable[..., str]


@pytest.fixture
def tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Tune:
    """Run tune with short trials, and return the printed text."""
    monkeypatch.setattr(trials, "SECONDS", 0.05)
    monkeypatch.setattr(search, "NUM_RATES", 40)

    def run(*overrides: str, status: int = 0, **groups: str) -> str:
        chosen = write_conf(tmp_path / "mine", **groups) if groups else []
        assert main([*chosen, "trainer.accelerator=cpu", *overrides]) == status
        printed = capsys.readouterr()
        assert bool(printed.err) == bool(status)
        return printed.err or printed.out

    return run


def net(name: str = "Net", lr: str = "lr: 0.1") -> str:
    return f"_target_: tests.tune.modules.{name}\n{lr}\n"


def pasted(printed: str) -> dict[str, str]:
    return dict(word.split("=") for word in shlex.split(printed.splitlines()[-1]))


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_the_line_can_be_pasted_and_nothing_was_written(tune: Tune, tmp_path: Path) -> None:
    before = files(ROOT)
    printed = tune("experiment=synthetic", "data.num_train=320")
    assert files(ROOT) == before
    assert all(len(line) <= 80 for line in printed.splitlines())
    line = printed.splitlines()[-1]
    assert list(pasted(printed)) == ["data.batch_size", "data.num_workers", "model.optimizer.lr"]
    overrides = ("experiment=synthetic", *line.split(), f"output_dir={tmp_path}")
    result = command("train.py", *overrides, "debug=fast_dev_run")
    assert result.returncode == 0, result.stderr


@pytest.mark.ci
def test_a_module_and_data_of_the_user_are_measured(tune: Tune) -> None:
    found = pasted(tune(model=net(), data=DATA))
    assert list(found) == ["data.batch_size", "data.num_workers", "model.lr"]
    assert 1e-6 < float(found["model.lr"]) <= 1


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_found_from_below_and_from_above(tune: Tune) -> None:
    for size, tried in ((10, ["10", "20", "40"]), (64, ["64", "32", "16"])):
        printed = tune(f"data.batch_size={size}", model=net("LargeNet"), data=DATA)
        rows = re.findall(r"^ +(\d+) +(?:[\d,]+ |does not fit)", printed, re.MULTILINE)
        assert rows[:3] == tried, printed
        assert f"A batch of {2 * int(tried[-2]) if size == 10 else 32} does not fit." in printed
        assert int(pasted(printed)["data.batch_size"]) <= 20


@pytest.mark.slow
def test_a_batch_of_which_not_one_sample_fits_ends_in_a_line(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.tune.modules.MOST_SAMPLES", 0)
    printed = tune(model=net("LargeNet"), data=DATA, status=2)
    assert printed == "A single sample does not fit into memory. Use a smaller model.\n"


@pytest.mark.slow
def test_a_data_set_that_is_smaller_than_a_batch_ends_the_search(tune: Tune) -> None:
    printed = tune("data.num_train=12", model=net(), data=f"{DATA}num_train: 12\n")
    assert "The data set has no more samples." in printed
    assert pasted(printed)["data.batch_size"] == "12"
    dropped = tune(model=net(), data=f"{DATA}num_train: 12\ndrop_last: true\n", status=2)
    assert dropped == "The training loader gave no batch. Use a smaller data.batch_size.\n"


@pytest.mark.slow
def test_slow_samples_want_workers_and_quick_ones_do_not(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "usable_cores", lambda: 4)
    slow = tune(model=net(), data=f"{DATA}seconds: 0.01\n")
    assert int(pasted(slow)["data.num_workers"]) > 0
    monkeypatch.setattr(search, "INPUT_BOUND", 1000.0)  # however busy this machine is
    assert pasted(tune(model=net(), data=DATA))["data.num_workers"] == "0"


@pytest.mark.slow
def test_a_loop_of_the_modules_own_gets_all_but_a_rate(tune: Tune) -> None:
    printed = tune(model="_target_: tests.modules.several.Adversaries\n", data=DATA)
    assert "(automatic_optimization=False), with \n2 optimizers." in printed
    assert list(pasted(printed)) == ["data.batch_size", "data.num_workers"]


@pytest.mark.slow
def test_what_has_no_key_in_the_config_is_said(tune: Tune) -> None:
    printed = tune("data=null", model=net("OwnLoaders"))
    assert "The config has no data.batch_size" in printed
    assert "The config has no data.num_workers" in printed
    assert list(pasted(printed)) == ["model.lr"]
    several = net(lr="lr: 0.1\n").replace("Net", "Rates") + "head:\n  lr: 0.2\n"
    assert "the config has model.lr and model.head.lr." in tune(model=several, data=DATA)


@pytest.mark.slow
def test_several_devices_share_the_batch_that_is_pasted(tune: Tune) -> None:
    overrides = ("strategy=ddp", "trainer.devices=2", "data.batch_size=32")
    printed = tune(*overrides, model=net(), data=DATA)
    assert "2 devices split a batch." in printed
    assert re.search(r"^ +16 ", printed, re.MULTILINE)
    assert int(pasted(printed)["data.batch_size"]) % 32 == 0


def test_mistakes_and_failures_end_in_a_few_lines(tune: Tune, tmp_path: Path) -> None:
    assert "Did you mean experiment=synthetic?" in tune("experiment=syntetic", status=2)
    assert "tune has no option -m" in tune("-m", status=2)
    printed = tune(model=net("BrokenNet"), data=DATA, status=1)
    assert "modules.py" in printed
    assert len(printed.splitlines()) <= 3
    printed = tune(model=net("Interrupted"), data=DATA, status=130)
    assert printed == "Stopped. tune has written nothing.\n"


@pytest.mark.parametrize(("second", "is_told"), [(0.5, True), (0.9, False)])
def test_a_disturbed_measurement_is_told(
    second: float,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A batch of twice the size cannot need half the time."""
    seconds = {64: 1.0, 128: second, 256: 2.0, 512: 4.0}
    monkeypatch.setattr(
        search, "measure_steps", lambda _, size: Steps(size, seconds[size], 0, 10**6, 1, False)
    )
    cfg = OmegaConf.create({"data": {"batch_size": 64}, "trainer": {"accelerator": "cpu"}})
    search.tune_batch_size(cfg, 1, paste := [])
    assert paste == ["data.batch_size=128"]
    printed = capsys.readouterr().out
    assert ("Run the command again when nothing else runs." in printed) == is_told
    assert all(len(line) <= 80 for line in printed.splitlines())


def test_the_rate_is_that_of_the_steepest_fall() -> None:
    rates = [10 ** (i / 10 - 6) for i in range(60)]
    losses = [2.0 - 1e-9 * i if i < 40 else 2.0 - 0.3 * (i - 39) for i in range(50)]
    losses += [losses[-1] + i for i in range(10)]
    rate = trials.steepest(rates, losses)
    assert isinstance(rate, float)
    assert 40 <= rates.index(rate) <= 48
    rising = trials.steepest(rates, [float(i) for i in range(60)])
    assert rising == "the loss falls at no rate from 1e-6 to 1"
    still_falling = trials.steepest(rates, [-float(i * i) for i in range(60)])
    assert still_falling == "the loss falls fastest at the largest rate of the search"


@pytest.mark.slow
def test_a_size_that_fails_ends_the_search_and_keeps_the_sizes_before(tune: Tune) -> None:
    printed = tune(model=net("SmallBatches"), data=DATA)
    assert "A batch of 32 fails: too many rows\n" in printed
    assert "data.batch_size=16" in printed


def test_a_training_that_ends_before_a_trial_is_named(tune: Tune) -> None:
    printed = tune(model=net("Stops"), data=DATA, status=2)
    assert "ended after 5 batches" in printed
    assert "trainer.should_stop" in printed


@pytest.mark.slow
def test_a_stream_is_asked_for_no_batch_that_it_cannot_give(tune: Tune) -> None:
    printed = tune(model=net(), data=DATA.replace("Measures", "StreamOfRows"))
    sizes = re.findall(r"(?m)^ +([\d,]+) +[\d,]+ +[\d.]+$", printed)
    assert sizes == ["16", "32", "60"]
    assert "The data set has no more samples." in printed
