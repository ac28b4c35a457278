"""Only a switch that is faster in every turn, and whose loss follows, is a word to paste."""

import math
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.testing import command
from harness.tuning import speed
from harness.tuning.commands import composed
from harness.tuning.contender import First, Turn
from harness.tuning.speed import Process, Trial, choose_switches, difference
from tests_harness.conftest import ROOT
from tests_harness.tuning.test_tune import tune

NETWORKS = "tests_harness.tuning.networks"
PAUSED = (
    *("data=synthetic", "data.batch_size=50", "model=mlp", "trainer.accelerator=cpu"),
    *("~model.net.hidden", "~model.net.dropout", f"model.net._target_={NETWORKS}.Paused"),
)
BF16, LAYOUT = "trainer.precision=bf16-mixed", "channels_last=true"


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes a quarter of a minute.

    The first test of this file starts the server of processes, which have its environment.
    """
    monkeypatch.setenv("CXX", "no-such-compiler")


def rows(screen: str) -> dict[str, str]:
    """The table by its first words."""
    return {line.split()[0]: line for line in screen.splitlines() if line}


def test_switches_that_gain_are_tried_together_and_pasted(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []

    class Noted(tempfile.TemporaryDirectory):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__()
            folders.append(self.name)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Noted)
    words = (*PAUSED, "trainer.max_steps=5", f"output_dir={tmp_path / 'runs'}")
    status = tune.main(["speed", "--seconds=6", *words])
    screen = capsys.readouterr()
    assert status == 0, screen.err
    assert set(screen.out.splitlines()[-1].split()) == {BF16, LAYOUT}
    table = rows(screen.out)
    assert "is for NVIDIA GPUs, and this is cpu" in table["tf32=true"]
    assert "is on" in table["model.optimizer.fused=true"]
    assert "no-such-compiler is not there" in table["compile=true"]
    assert "tune.py workers" in table["data.num_workers"]
    assert "losses of 5 steps compared" in screen.out
    assert not (tmp_path / "runs").exists()
    assert folders
    assert not any(Path(folder).exists() for folder in folders)


@pytest.mark.parametrize(
    ("kind", "said"), [("diverges", "the loss does not follow"), ("overflows", "at step 1")]
)
def test_faster_switch_that_changes_the_loss_is_not_pasted(kind: str, said: str, capsys) -> None:
    words = choose_switches([*PAUSED, f"+model.net.kind={kind}"], 6)
    assert words == (LAYOUT,)
    assert said in rows(capsys.readouterr().out)[BF16]


def test_noise_does_not_choose() -> None:
    def trial(*speeds: float, **more: float) -> Trial:
        turns = [(Turn(100.0, True, 1), Turn(speed, True, 1)) for speed in speeds]
        return Trial(("tf32=true",), 1e-2, difference=0.0, turns=turns, **more)  # type: ignore[arg-type]

    assert trial(110, 120, 105).is_winner
    assert not trial(300, 300, 99).is_winner
    assert not trial(101, 102, 101).is_winner
    told = trial(300, 300, 300)
    told.why_not = "the loss does not follow"
    assert not told.is_winner
    assert "does not follow" in told.row()


def test_losses_are_compared_by_their_mean() -> None:
    plain = First([2.0, 4.0], [1.0], False, True)
    assert difference(plain, First([2.0, 4.3], [1.0], False, True)) == pytest.approx(0.1)
    with pytest.raises(UserError, match="the loss is nan at step 2"):
        difference(plain, First([2.0, math.nan], [1.0], False, True))
    with pytest.raises(UserError, match="1 losses instead of 2"):
        difference(plain, First([2.0], [1.0], False, True))


def first_steps(folder: Path, *words: str, draws_otherwise: bool = False) -> First:
    cfg = composed([*PAUSED, *words])
    with Process(cfg, str(folder), draws_otherwise) as process:
        process.answer()
        steps: First = process.answer((4, math.inf))
    return steps


def test_every_process_takes_the_same_steps_and_dropout_is_known(tmp_path: Path) -> None:
    """Compiled dropout draws otherwise: how far that alone moves a loss is measured."""
    assert not first_steps(tmp_path, "+model.net.kind=follows").draws
    drops = first_steps(tmp_path, "+model.net.kind=drops")
    again = first_steps(tmp_path, "+model.net.kind=drops")
    otherwise = first_steps(tmp_path, "+model.net.kind=drops", draws_otherwise=True)
    assert drops.draws
    assert drops.losses == again.losses
    assert len(drops.losses) == 4
    assert 1e-3 < difference(drops, otherwise) < 0.5


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """With a model that brings everything itself."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    yaml = f"_target_: {NETWORKS}.ByHand\nbackward: lightning\n"
    (tmp_path / "conf" / "model" / "by_hand.yaml").write_text(yaml)
    return tmp_path / "conf"


OWN = ("data=none", "model=by_hand", "trainer.accelerator=cpu")


def test_module_with_its_own_loader_and_steps_is_tried(
    conf: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "WORTH", math.inf)  # whatever the machine does meanwhile
    with pytest.raises(UserError, match="No switch gains"):
        choose_switches(
            [*OWN, "strategy=ddp", "trainer.devices=2", "trainer.max_epochs=2"], 2, conf
        )
    screen = capsys.readouterr().out
    table = rows(screen)
    assert "the module's own code makes SGD" in table["fused=true"]
    assert "no convolution" in table[LAYOUT]
    assert "of 5e-02" in table[BF16]
    assert "Measured in one process" in screen


@pytest.mark.parametrize(
    ("backward", "said"),
    [
        ("torch", "return the loss from training_step"),
        ("not_finite", "The plain run's loss is not finite"),
        ("bug", "networks.py:"),
    ],
)
def test_run_that_cannot_be_compared_says_why(conf: Path, backward: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose_switches([*OWN, f"model.backward={backward}"], 2, conf)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["speed", "--seconds=0"], "must be a number, 1 or more"),
        (["speed", "lr=3"], "Did you mean model.optimizer.lr?"),
        (["speed", "trainer.benchmark=true", "trainer.deterministic=true"], "Leave out one"),
    ],
)
def test_mistake_is_explained(arguments: list[str], hint: str, capsys) -> None:
    assert tune.main(arguments) == 1
    assert hint in capsys.readouterr().err


@pytest.mark.slow
def test_compiled_dropout_is_not_called_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    words = ("data=synthetic", "model=mlp", "model.net.dropout=0.5", "trainer.accelerator=cpu")
    result = command("scripts/tune.py", "speed", "--seconds=60", *words)
    assert result.returncode == 0 or "No switch gains" in result.stderr, result.stderr
    row = rows(result.stdout)["compile=true"]
    assert "MiB" in row
    assert "does not follow" not in row


@pytest.mark.gpu
def test_switches_of_a_gpu_are_tried(capsys) -> None:
    words = [word for word in PAUSED if not word.startswith("trainer.accelerator")]
    with suppress(UserError):  # the network waits as long with each of them
        choose_switches(words, 60)
    table = rows(capsys.readouterr().out)
    assert "of 1e-02" in table["tf32=true"]
    assert "of 1e-02" in table["trainer.benchmark=true"]
    assert "of 5e-02" in table[BF16]
