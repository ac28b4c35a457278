"""A proof finds planted faults and calls right modules equal; what a person sees of it."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.prove import __main__ as script
from harness.prove import compare, short_runs
from harness.prove.compare import (
    BITWISE,
    DOUBLE,
    EQUAL,
    PACKAGES,
    REFERENCE,
    SINGLE,
    WARNING,
    differences,
    prove,
)
from tests.conftest import LIBRARY, ci, slow
from tests.faults.fast_command import Forked
from tests.faults.fork_server import fork
from tests.modules import classifiers
from tests.strategy_runs import write_conf

SEEN = {"steps": 0}  # of a process alone


class Forgets(classifiers.Classifier):
    """Counts its steps where no checkpoint looks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SEEN["steps"] += 1
        return F.cross_entropy(self(batch[0] - 0.1 * SEEN["steps"]), batch[1])


class Crashes(classifiers.Classifier):
    """Expects the batch of one process."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).view(8, 3), batch[1])


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the runs of a proof from this program, which has imported what they need."""

    def start_program(*given: Any) -> Forked:
        with warnings.catch_warnings():
            warnings.resetwarnings()  # to a user a warning is no error
            return fork(*given)

    monkeypatch.setattr(short_runs, "start_program", start_program)


@pytest.fixture
def prove_module(forked: None, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(module: str, *strategies: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
        dataset = "Sentences" if module.endswith("MaskedLanguage") else "Flowers"
        data = f"_target_: tests.modules.data.Data\ndataset: {dataset}\n"
        words = write_conf(tmp_path, data=data, model=f"_target_: tests.{module}\n")
        verdicts = prove(short_runs.ExperimentRuns([*words, *more], tmp_path / "runs"), strategies)
        return {one.name: one for one in verdicts}

    return run


@pytest.mark.parametrize(
    ("module", "row", "verdict", "reason"),
    [
        *ci(("modules.text.MaskedLanguage", "ddp(2)", "DIFFERS", "mean_over(loss, number)")),
        ("prove.test_prove.Forgets", "resume, one process", "DIFFERS", " by "),
        *slow(
            ("prove.test_prove.Crashes", "ddp(2)", "FAILS", "shape '[8, 3]' is invalid"),
            ("modules.logged.Counters", "ddp(2)", "refused", "differs between ranks"),
            ("modules.habits.Mixup", "ddp(2)", "warned", "random numbers"),
            ("modules.classifiers.BatchNorm", "ddp(2)", "warned", "sync_batchnorm=true"),
        ),
    ],
)
def test_a_planted_fault_is_found(
    module: str, row: str, verdict: str, reason: str, prove_module: Any
) -> None:
    found = prove_module(module, "dp(2)" if "resume" in row else row)
    assert found[row].verdict == verdict, str(found[row])
    assert reason in " ".join(str(found[row]).split())


def test_warning_of_one_process_explains_a_difference_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of BatchNorm with accumulated batches."""
    for text, verdict in (
        ("BatchNorm sees only the local batch", "warned"),
        ("All runs are without dropout. Switched off: p", "DIFFERS"),
        ("Net does not train alike on 2 ranks and on one", "DIFFERS"),
    ):
        one, several = record(1.0), record(2.0)
        one.warnings = several.warnings = [text]
        monkeypatch.setattr(compare, "RunResult", lambda _, several=several: several)
        ended: Any = SimpleNamespace(status=0, run_dir=None)
        assert compare.compare("ddp(2)", ended, one, DOUBLE).verdict == verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "strategies", "more"),
    [
        ("Dropout", ("dp(2)", "ddp(2)", "ddp(3)", "ddp2(2x2)"), ()),  # it is off in all runs
        ("BatchNorm", ("ddp(2)",), ("trainer.sync_batchnorm=true",)),
    ],
)
def test_a_module_without_fault_is_equal(
    module: str, strategies: tuple[str, ...], more: tuple[str, ...], prove_module: Any
) -> None:
    found = prove_module(f"modules.classifiers.{module}", *strategies, more=more)
    assert {"resume, one process", "resume, ddp(2)"} < {*found}
    assert {str(one) for one in found.values() if one.verdict not in (EQUAL, REFERENCE)} == set()


def record(weight: float, **values: float) -> Any:
    """A run of one weight, with what it has logged."""
    weights = {"w": torch.tensor([weight], dtype=torch.float64)}
    return SimpleNamespace(weights=weights, values={k: torch.tensor(v) for k, v in values.items()})


def test_warnings_of_the_packages_that_keep_training_equal_are_found() -> None:
    for name in PACKAGES.split("|"):
        assert (LIBRARY / "src" / "harness" / name).is_dir(), name
    line = "2026-11-27 20:00:00,000 WARNING harness.parity.parity_callback: It draws.\n"
    assert WARNING.findall(line) == ["It draws.\n"]


def test_what_is_more_than_rounding_differs() -> None:
    for far, tolerance, differs in (
        (1e-10, DOUBLE, False),
        (1e-7, DOUBLE, True),
        (1e-7, SINGLE, False),
        (1e-5, SINGLE, True),
        (2e-17, BITWISE, True),  # one bit
        (0.0, BITWISE, False),
    ):
        assert differences(record(0.1), record(0.1 + far), tolerance)[0][0] == differs
    assert differences(record(2.0, x=1), record(2.5, x=2), DOUBLE)[1] == (True, 0.25, "w")
    for other in (record(1, loss=1.001), record(1, loss=float("nan")), record(1)):
        for pair in ((record(1, loss=1), other), (other, record(1, loss=1))):
            assert differences(*pair, DOUBLE)[0][::2] == (True, "loss")


def test_a_mistake_in_the_command_is_answered_without_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for word, answer in {
        "experiment=missing": "experiment=missing: there is no conf/experiment/missing.yaml.",
        "--strategies=ddp": "--strategies ddp: use names such as dp(2), ddp(3) or ddp2(2x2).",
        "trainer.max_steps=2": "trainer.max_steps=2 is too small. Use 4 or more.",
        "trainer.max_steps=few": "trainer.max_steps=few",
        "trainer.precision=bf16-mixed": "Use 64-true or 32-true",
        "strategy=ddp": "This command sets strategy for each run",
        f"--keep={tmp_path}": "the folder exists already. Name a new folder.",
    }.items():
        assert script.main([word]) == 2
        errors = capsys.readouterr().err
        assert answer in errors
        assert len(errors.splitlines()) <= 3


@pytest.mark.usefixtures("forked")
def test_an_experiment_that_does_not_train_ends_in_its_own_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script.main(["data=synthetic", "model=mlp", "model.net.in_features=63"]) == 2
    _, *errors = capsys.readouterr().err.splitlines()
    assert "models.py" in "".join(errors)
    assert len(errors) <= 3


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_shipped_experiment_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=synthetic", "--strategies=dp(2),ddp(2)", "trainer.precision=32-true"]
    assert script.main(words) == 0
    assert capsys.readouterr().out.count(EQUAL) == 4


def test_a_run_on_two_nodes_ends_with_the_sentence_of_the_one_that_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of the other one breaks, with an abort and a traceback that say nothing."""
    ends = {"0": (-6, "Traceback: remote worker crashing\n" * 9), "1": (1, "Use strategy=ddp.\n")}

    def start_program(arguments: list[str], env: dict[str, str], path: Path) -> Any:
        status, said = ends[env["NODE_RANK"]]
        path.with_suffix(".err").write_text(said)
        return SimpleNamespace(wait=lambda _: status, poll=lambda: status)

    monkeypatch.setattr(short_runs, "start_program", start_program)
    ended = short_runs.ExperimentRuns(["data=synthetic", "model=mlp"], tmp_path).start("ddp2(2x2)")
    assert (ended.message, ended.has_crashed) == ("Use strategy=ddp.", False)
