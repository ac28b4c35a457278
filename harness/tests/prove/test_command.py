"""What a person sees of ``scripts/prove.py``."""

import json
import sys
from pathlib import Path

import pytest

from harness.prove import __main__ as script
from harness.prove.compare import DIFFERS, EQUAL, Difference, Proof, Verdict


def test_a_mistake_in_the_command_is_told_in_lines_without_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "earlier").touch()
    mistakes = {
        "experiment=missing": "experiment=missing: there is no conf/experiment/missing.yaml.",
        "--strategies=ddp": "--strategies ddp: use names such as dp(2), ddp(3) or ddp2(2x2).",
        "trainer.max_steps=2": "trainer.max_steps=2: use 4 or more",
        "trainer.max_steps=few": "trainer.max_steps=few",
        "trainer.precision=bf16-mixed": "64-true or 32-true",
        "strategy=ddp": 'strategy is what is tried here: use --strategies "ddp(4)".',
        f"--keep={tmp_path}": "there is something in it. Name a new folder.",
        "--json=missing/proof.json": "there is no such folder.",
    }
    for word, said in mistakes.items():
        assert script.main([word]) == 2
        told = capsys.readouterr().err
        assert said in told
        assert len(told.splitlines()) <= 3


def test_help_shows_the_command_that_was_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, typed in (
        ("scripts/prove.py", "python scripts/prove.py"),
        ("/harness/prove/__main__.py", "python -m harness.prove"),
    ):
        monkeypatch.setattr(sys, "argv", [name])
        with pytest.raises(SystemExit):
            script.main(["--help"])
        assert capsys.readouterr().out.startswith(f"usage: {typed} [-h]")


@pytest.mark.usefixtures("forked")
def test_an_experiment_that_does_not_train_is_told_with_its_own_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script.main(["data=synthetic", "model=mlp", "model.net.in_features=63"]) == 2
    told = capsys.readouterr().err.splitlines()
    running = [line for line in told if "running: " in line]
    assert running
    told = [line for line in told if line not in running]
    assert "models.py" in "".join(told)
    assert len(told) <= 3


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_table_and_its_json_of_a_shipped_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "proof.json"
    words = ["experiment=synthetic", "--strategies=dp(2),ddp(2)", "trainer.precision=32-true"]
    assert script.main([*words, f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    assert {verdict["verdict"] for verdict in found["verdicts"]} == {EQUAL}
    table = capsys.readouterr().out
    for verdict in found["verdicts"]:
        assert verdict["name"] in table


def test_the_table_shows_what_differs_first_and_each_verdict() -> None:
    tiny = {f"layer_{i}.weight": Difference(True, i * 1e-18) for i in range(40)}
    far = tiny | {"layer_3.weight": Difference(False, 0.25)}
    verdicts = [
        Verdict("dp(2)", EQUAL, "at most layer_39.weight by 3.9e-17", tiny),
        Verdict("ddp(2)", DIFFERS, "layer_3.weight by 2.5e-01", far),
    ]
    lines = script.table(Proof("experiment=mine", "6 steps", verdicts, ["A note."])).splitlines()
    cells = [line.split() for line in lines]
    assert ["layer_3.weight", "3.0e-18", "2.5e-01!"] in cells
    assert ["layer_39.weight", "3.9e-17", "3.9e-17"] in cells
    assert not any("layer_5.weight" in row for row in cells)
    assert any(row[:2] == ["ddp(2)", DIFFERS] for row in cells)
    assert lines[-1] == "A note."
