"""The average is what is validated, kept, tested and converted; the weights train on."""

import json
from pathlib import Path

import pytest
import torch

from harness import load_run
from harness.checkpoints.reading import read
from harness.command.compose import compose
from harness.convert import load
from tests.conftest import slow, train_command
from tests.faults.fork_server import command
from tests.faults.resume_sweep import COMMON, train
from tests.features.runs import WITH_BUFFERS, Recorder, State
from tests.strategy_runs import farthest

RECORDED = ("callbacks=ema", "+callbacks.recorder._target_=tests.features.runs.Recorder")


def trained(folder: Path, *words: str) -> State:
    """Train, and return the last checkpoint."""
    train(compose("train", [*COMMON, *RECORDED, *words, f"run_dir={folder}"]))
    return read(folder / "checkpoints" / "last.ckpt")


def averages(states: list[State], decay: float) -> list[State]:
    """Return the average after each step, by the formula and in double precision."""
    found = [{name: tensor.double() for name, tensor in states[0].items()}]
    for num, state in enumerate(states[1:], start=1):
        stays = min(decay, (1 + num) / (10 + num))
        last = found[-1]
        found.append({n: stays * last[n] + (1 - stays) * state[n].double() for n in state})
    return found


def test_what_is_validated_and_kept_is_the_average_and_the_weights_train_on(tmp_path: Path) -> None:
    last = trained(tmp_path, "callbacks.ema.decay=0.7")
    expected = averages(Recorder.after_steps, 0.7)
    assert (len(expected), len(Recorder.validated)) == (15, 3)
    for step, validated in zip((4, 9, 14), Recorder.validated, strict=True):
        assert farthest(validated, expected[step]) <= 1e-6
        assert farthest(validated, Recorder.after_steps[step]) > 1e-4
    for number, at_end in enumerate(Recorder.at_end):
        assert farthest(at_end, Recorder.validated[number // 2]) == 0
    best = read(tmp_path / "checkpoints" / "best.ckpt")  # written at the end of a validation
    steps = [4, 9, 14]
    at = steps.index(best["global_step"] - 1)
    assert farthest(best["state_dict"], Recorder.validated[at]) == 0
    assert farthest(best["current_model_state"], Recorder.after_steps[steps[at]]) == 0
    assert farthest(last["state_dict"], Recorder.validated[-1]) == 0
    assert farthest(last["current_model_state"], Recorder.after_steps[-1]) == 0


def test_statistics_are_averaged_and_other_buffers_stay_unlike_with_lightnings_own(
    tmp_path: Path,
) -> None:
    """Else Averaging in harness/upstream/precision.py is not needed any more."""
    words = (*WITH_BUFFERS, "callbacks.ema.decay=0.9")
    state = trained(tmp_path / "ours", *words)["state_dict"]
    name = "net.first.2.running_mean"
    expected = averages(Recorder.after_steps, 0.9)[-1][name]
    assert torch.allclose(state[name].double(), expected, atol=1e-6)
    assert state["net.first.2.num_batches_tracked"] == 15
    for name in ("net.positions", "net.is_kept", "net.scale"):
        assert torch.equal(state[name], Recorder.after_steps[0][name]), name
    theirs = "callbacks.ema._target_=pytorch_lightning.callbacks.EMAWeightAveraging"
    positions = trained(tmp_path / "theirs", *words, theirs)["state_dict"]["net.positions"]
    assert not torch.equal(positions, torch.arange(64))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_ema(tmp_path_factory.mktemp("one"))


def with_ema(folder: Path, *words: str) -> Path:
    """A run of the command, in double precision and with uneven shares."""
    experiment = ("data=synthetic", "model=mlp", "data.batch_size=37", "data.noise=0.1")
    lengths = ("trainer.max_epochs=2", "trainer.precision=64-true")
    together = ("callbacks=[ema,early_stopping,top_k]", "callbacks.ema.decay=0.9")
    return train_command(folder, *experiment, *lengths, *together, *words)


@pytest.mark.parametrize("strategy", ["ddp", *slow("dp", "ddp2")])
def test_average_under_a_strategy_is_that_of_one_process(
    strategy: str, one_process: Path, tmp_path: Path
) -> None:
    other = with_ema(tmp_path, f"strategy={strategy}", "trainer.devices=2")
    best = [read(run / "checkpoints" / "best.ckpt") for run in (one_process, other)]
    for kind in ("state_dict", "current_model_state"):
        assert farthest(best[0][kind], best[1][kind]) <= 1e-12
    results = [json.loads((run / "results.json").read_text()) for run in (one_process, other)]
    assert results[1] == pytest.approx(results[0], abs=1e-6)


def test_whatever_uses_a_run_afterwards_takes_the_average(
    one_process: Path, tmp_path: Path
) -> None:
    best = one_process / "checkpoints" / "best.ckpt"
    checkpoint, run = read(best), load_run(one_process)
    assert farthest(checkpoint["state_dict"], checkpoint["current_model_state"]) > 1e-3
    assert farthest(dict(run.model.state_dict()), checkpoint["state_dict"]) <= 1e-7  # single
    result = command("evaluate.py", f"checkpoint={best}", f"output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    (again,) = tmp_path.glob("evaluate/*/results.json")
    tested = {name: value for name, value in run.results.items() if name.startswith("test/")}
    assert json.loads(again.read_text()) == tested != {}
    for ema, kind in ((True, "state_dict"), (False, "current_model_state")):
        for name, tensor in load(best, ema=ema).items():
            assert torch.equal(tensor, checkpoint[kind][f"net.{name}"])
