"""What a person sees of ``scripts/prove.py``."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from harness.prove import __main__ as script
from harness.prove import report
from harness.prove.runs import Runs, strategy
from harness.prove.verdicts import BROKEN, HOLDS, Proof, Verdict


def test_a_mistake_in_the_command_is_told_in_lines_without_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mistakes = {
        "experiment=missing": "experiment=missing: there is no conf/experiment/missing.yaml.",
        "--strategies=ddp": "--strategies ddp: use names such as dp(2), ddp(3) or ddp2(2x2).",
        "--steps=2": "--steps 2: use 3 or more",
        "strategy=ddp": 'strategy is what is tried here: use --strategies "ddp(4)" instead.',
    }
    for word, said in mistakes.items():
        assert script.main([word]) == 1
        told = capsys.readouterr().err
        assert said in told
        assert len(told.splitlines()) <= 3


@pytest.mark.usefixtures("forked")
def test_an_experiment_that_does_not_train_is_told_with_its_own_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script.main(["data=synthetic", "model=mlp", "model.net.in_features=63"]) == 1
    told = capsys.readouterr().err.splitlines()
    # Where nobody looks at a terminal each run has a line, which says that it goes on.
    running = [line for line in told if line.startswith("running: ")]
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
    words = ["experiment=synthetic", "--strategies=dp(2),ddp(2)", "--precision=32-true"]
    assert script.main([*words, f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    assert {verdict["status"] for verdict in found["verdicts"]} == {HOLDS}
    table = capsys.readouterr().out
    for verdict in found["verdicts"]:
        assert verdict["promise"] in table


def test_a_broken_promise_is_shown_with_its_reason_and_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verdicts = [
        Verdict("dp(2)", HOLDS, "largest difference 1e-17"),
        Verdict("ddp(2)", BROKEN, "parameter w, first at step 1", "a sum", "return loss / n"),
    ]
    proof = Proof("experiment=mine", "6 steps", verdicts)
    report.show(proof, Console(width=80, soft_wrap=True))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("ddp(2)") and "BROKEN" in line for line in lines)
    assert lines.index("a sum") + 1 == lines.index("return loss / n")
    assert proof.is_broken


def test_settings_of_a_strategy_are_not_typed_for_another(tmp_path: Path) -> None:
    typed = ["trainer.strategy.blocks=false", "trainer.strategy.scalar_outputs=mean"]
    typed += ["trainer.strategy.find_unused_parameters=true", "trainer.strategy.modules=[net]"]
    runs = Runs(["experiment=synthetic", *typed], tmp_path, 3, 60.0)
    one, two, three, four = (f"++{word}" for word in typed)
    kinds = {name: runs.settings_of(strategy(name)) for name in ("dp(2)", "ddp(2)", "fsdp(2)")}
    assert kinds == {"dp(2)": [two, four], "ddp(2)": [three], "fsdp(2)": [one, four]}
    assert runs.settings_of(strategy("ddp2(2x2)")) == [two, three, four]
