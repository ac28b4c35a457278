"""``scripts/runs.py``: runs in any state are listed, found and compared."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from harness import UserError, provenance
from harness import compare as runs
from harness.checkpoints.lookup import by_step
from harness.errors import AgreedExit
from harness.runs import reading, table
from tests.conftest import ROOT


def copied(trained: Path, folder: Path, *changes: tuple[str, str]) -> Path:
    """Copy a run, with other lines in its config."""
    shutil.copytree(trained, folder, symlinks=True)
    text = (folder / "config.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "config.yaml").write_text(text)
    return folder


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert runs.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def rows(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(answer(capsys, *words, "--json"))
    return found


def test_a_finished_run_is_listed_with_what_it_has_reached(finished_run: Path, capsys) -> None:
    (row,) = rows(capsys, "ls", finished_run.parent)
    results = json.loads((finished_run / "results.json").read_text())
    assert (row["status"], row["run"]) == ("finished", str(finished_run))
    assert row["test/accuracy"] == results["test/accuracy"]
    values = reading.read_table(finished_run / "metrics.csv")["val/accuracy"].drop_nulls()
    assert row["best"] == pytest.approx(values.max())
    assert row["samples/s"] > 0
    assert row["seconds"] > 0


def test_the_use_of_gpus_is_a_column_where_a_run_has_it(
    finished_run: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    one, other = (copied(finished_run, tmp_path / name) for name in ("one", "other"))
    assert "gpu" not in answer(capsys, "ls", one, other).splitlines()[0]
    provenance.note(one, gpu_gib=31.25, gpu_busy=0.934)
    lines = answer(capsys, "ls", one, other).splitlines()
    assert re.search(r" gpu_gib +gpu_busy", lines[0])
    assert re.search(r" 31\.25 +0\.934 ", lines[1])
    found = rows(capsys, "ls", one, other, "--filter", "gpu_busy<1")
    assert [row["gpu_gib"] for row in found] == [31.25]


def test_every_other_state_is_named_with_its_reason(finished_run: Path, tmp_path, capsys) -> None:
    for name in ("running", "killed", "failed", "damaged", "damaged results"):
        folder = copied(finished_run, tmp_path / name)
        (folder / "results.json").unlink()
        provenance.note(folder, status=None, reason=None)
    (tmp_path / "damaged results" / "results.json").write_text("{")
    provenance.note(tmp_path / "failed", status="failed", reason="ValueError: no horses")
    (tmp_path / "damaged" / "config.yaml").write_text("data: [")
    lock = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); "
    lock += "print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", lock, str(tmp_path / "running" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        listed = rows(capsys, "ls", tmp_path)
        holder.communicate()
    last = by_step(finished_run / "checkpoints")[-1].stem
    assert {Path(row["run"]).name: (row["status"], row["reason"]) for row in listed} == {
        "running": ("running", None),
        "killed": ("stopped", f"killed after {last}"),
        "failed": ("failed", "ValueError: no horses"),
        "damaged": ("damaged", "config.yaml cannot be read"),
        "damaged results": ("damaged", "results.json cannot be read"),
    }
    lines = answer(capsys, "ls", tmp_path / "damaged", tmp_path / "failed").splitlines()
    (number,) = (n for n, line in enumerate(lines) if line.endswith(f" {tmp_path / 'failed'}"))
    assert lines[number].split()[0] == "failed"
    assert lines[number + 1] == "    ValueError: no horses"


def test_what_stands_in_files_of_a_run_is_read_or_left_out(finished_run: Path, tmp_path) -> None:
    """Settings of several kinds, a list or a text of any length, a name that is no text."""
    folder = copied(finished_run, tmp_path / "a", ("lr: 0.005", "lr: [1, {a: b}]"))
    copied(finished_run, tmp_path / "b\udcff", ("seed: 1", f"seed: {10**40}"))
    metrics = {"seconds": 0.25, "seed": 3.0}  # a fact and a setting have these names
    (tmp_path / "b\udcff" / "results.json").write_text(json.dumps(metrics))
    (folder / "metrics.csv").write_text("step,val/accuracy\n1,nan\n2,0.5\n3,inf\nx,y")
    (folder / "results.json").unlink()
    found = reading.find([tmp_path]).frame
    assert found["best"][0] == 0.5
    assert found["model.optimizer.lr"].to_list() == ["[1,{'a': 'b'}]", "0.005"]
    assert found["run"][1].endswith("b?")
    assert found.select("metrics.seconds", "metrics.seed").row(1) == (0.25, 3.0)
    assert found["seed"][0] == 1


def test_seeds_and_folds_are_one_row_with_an_interval(finished_run: Path, tmp_path, capsys) -> None:
    values = {"a": (1, 0, 0.005, 0.8), "b": (2, 0, 0.005, 0.9), "c": (1, 1, 0.005, 1.0)}
    values["d"] = (1, 0, 0.03, 0.95)
    for name, (seed, fold, lr, value) in values.items():
        changes = ("lr: 0.005", f"lr: {lr}"), ("\nseed: 1\n", f"\nseed: {seed}\n")
        changes += (("\ndata:\n", f"\ndata:\n  fold: {fold}\n"),)
        folder = copied(finished_run, tmp_path / name, *changes)
        (folder / "results.json").write_text(json.dumps({"test/accuracy": value}))
    first, second = rows(capsys, "best", tmp_path, "--by", "test/accuracy")
    assert (first["runs"], first["model.optimizer.lr"], first["± 95 %"]) == (1, 0.03, None)
    assert (second["runs"], second["best run"]) == (3, str(tmp_path / "c"))
    assert second["test/accuracy"] == pytest.approx(0.9)
    deviation = 4.30265 * 0.1 / 3**0.5  # t of 2 degrees of freedom
    assert second["± 95 %"] == pytest.approx(deviation, rel=1e-4)


def test_runs_that_are_equal_but_for_their_folder_are_both_shown(
    finished_run: Path, tmp_path, capsys
) -> None:
    for name in ("a", "b"):
        copied(finished_run, tmp_path / name)
    found = rows(capsys, "best", tmp_path)
    assert {Path(row["best run"]).name for row in found} == {"a", "b"}
    copied(finished_run, tmp_path / "c", ("objective: val/accuracy", "objective: val/loss"))
    assert runs.main(["best", str(tmp_path)]) == 1
    assert "The runs have 2 objectives: " in capsys.readouterr().err


def test_difference_is_what_differs_alone(finished_run: Path, tmp_path, capsys) -> None:
    other = copied(finished_run, tmp_path / "other", ("lr: 0.005", "lr: 0.004"))
    found = {row["name"]: row["two"] for row in rows(capsys, "diff", finished_run, other)}
    assert found.pop("run") == str(other)
    assert found == {"model.optimizer.lr": 0.004, "model.scheduler.max_lr": 0.004}
    lines = [line.split() for line in answer(capsys, "diff", finished_run, other).splitlines()]
    assert ["model.optimizer.lr", "0.005", "0.004"] in lines
    ddp = copied(finished_run, tmp_path / "ddp", ("strategy: auto", "strategy: {bucket_cap_mb: 1}"))
    found = {row["name"]: row["two"] for row in rows(capsys, "diff", finished_run, ddp)}
    assert found["trainer.strategy.bucket_cap_mb"] == 1
    assert "bucket_cap_mb" not in answer(capsys, "ls", finished_run, ddp)  # the same experiment


def test_tables_for_a_person_hold_the_same_as_far_as_the_screen_goes(
    finished_run: Path, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracy = json.loads((finished_run / "results.json").read_text())["test/accuracy"]
    for words in (("show",), ("ls",), ("best", "--by", "test/accuracy")):
        assert str(accuracy)[:6] in answer(capsys, *words, finished_run)
    for number in range(2):
        changes = [(key, f"{key}{number}") for key in ("lr: 0.005", "num_test: 360", "blur: 0.5")]
        copied(finished_run, tmp_path / str(number), *changes)
    for columns in (70, 100, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        title, *_, last = answer(capsys, "ls", tmp_path).splitlines()
        omitted = last.partition("Columns that do not fit: ")[2].partition(". ")[0]
        names = title.split() + omitted.replace(" and ", ", ").split(", ")
        assert {"run", "status", "best", "lr", "blur", "test/accuracy"} <= {*names}
        assert title.split()[-1] == "run"
        assert len(title) <= columns


def test_80_columns_show_the_result_and_what_was_varied(
    finished_run: Path, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate is one column, though the schedule repeats it as ``max_lr``.

    A setting that only one run has comes later.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for number, lr in enumerate((0.001, 0.01)):
        folder = copied(
            finished_run, tmp_path / f"outputs/name/{number}", ("lr: 0.005", f"lr: {lr}")
        )
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("\ncallbacks:\n", "\ncallbacks:\n  a: 1\n"))
    (folder / "results.json").unlink()
    provenance.note(
        folder, status="failed", reason="a reason as long as half of the screen is wide"
    )
    title, first, second, reason, best, *_ = answer(capsys, "ls", "outputs").splitlines()
    assert title.split()[:6] == ["status", "best", "test/accuracy", "lr", "a", "test/loss"]
    assert first.split()[3] == "0.001"
    assert first.split()[0 :: len(first.split()) - 1] == ["finished", "outputs/name/0"]
    assert second.split()[0 :: len(second.split()) - 1] == ["failed", "outputs/name/1"]
    assert reason.startswith("    a reason as long")
    assert best == "best: the best val/accuracy of each run."


def test_best_counts_all_runs_by_the_same_rule_and_says_which(
    finished_run: Path, tmp_path, capsys
) -> None:
    """Runs with two objectives are compared by their final values of one metric."""
    for name, objective, final in (("a", "accuracy", 0.5), ("b", "loss", 0.25)):
        change = ("objective: val/accuracy", f"objective: val/{objective}")
        folder = copied(finished_run, tmp_path / name, change)
        (folder / "results.json").write_text(json.dumps({"val/accuracy": final}))
        provenance.note(folder, best=0.75)
    found = rows(capsys, "best", tmp_path, "--by", "val/accuracy")
    assert [(row["val/accuracy"], row["objective"]) for row in found] == [
        (0.5, "val/accuracy"),
        (0.25, "val/loss"),
    ]
    said = "val/accuracy: the final value of each run, the largest first"
    assert answer(capsys, "best", tmp_path, "--by", "val/accuracy").startswith(said)
    (alone,) = rows(capsys, "best", tmp_path / "a", "--by", "val/accuracy")
    assert alone["val/accuracy"] == 0.75
    said = "val/accuracy: the best value of each run, the largest first"
    assert answer(capsys, "best", tmp_path / "a").startswith(said)


def test_an_objective_that_is_nan_everywhere_is_called_so(finished_run, tmp_path, capsys) -> None:
    change = ("objective: val/accuracy", "objective: val/quality")
    folder = copied(finished_run, tmp_path / "a", change)
    (folder / "results.json").unlink()
    provenance.note(folder, best=None)
    assert runs.main(["best", str(tmp_path)]) == 1
    assert "None of 1 runs has a finite value of val/quality." in capsys.readouterr().err


def test_conditions_choose_runs_by_settings_results_and_tags(finished_run: Path, tmp_path) -> None:
    copied(finished_run, tmp_path / "run", ("tags: []", "tags: [baseline, first]"))
    found = reading.find([tmp_path])
    for condition, is_found in {
        "status=finished": True,
        "test/accuracy>=0": True,
        "model.optimizer.lr<0.005": False,
        "lr=5e-3": True,
        "lr!=0.005": False,
        "data.max_samples_per_device=null": True,
        "hidden=[128, 64]": True,
        "hidden=128,32": False,
        "tags=baseline": True,
        "tags!=first": False,
    }.items():
        with (
            nullcontext()
            if is_found
            else pytest.raises(UserError, match="None of 1 runs satisfies")
        ):
            table.filter_runs(found, [condition])


def test_a_job_that_failed_before_its_run_began_is_listed(tmp_path: Path, capsys) -> None:
    (tmp_path / "0").mkdir()
    provenance.note(tmp_path / "0", status="failed", reason="Slurm job 7 failed")
    assert runs.main(["ls", str(tmp_path)]) == 0
    assert re.search(r"failed .*/0\n +Slurm job 7 failed", capsys.readouterr().out)


def test_mistakes_are_told_in_a_line(finished_run: Path, tmp_path, capsys) -> None:
    twin = copied(finished_run, tmp_path / "copies" / "twin", ("seed: 1", "seed: 7"))
    (tmp_path / "none").mkdir()
    for words, message in (
        (["ls", "nowhere"], "nowhere is not a folder"),
        (["ls", tmp_path / "none"], "There is no run"),
        (["ls", finished_run, "--filter", "statu=1"], "No run has statu. Did you mean status?"),
        (["ls", finished_run, "--filter", "status"], "write a condition such as status=finished"),
        (
            ["diff", finished_run, twin, "--filter", "seed=7"],
            "diff needs 2 runs, but 1 run matches",
        ),
        (["best", finished_run, "--by", "notes"], "None of 1 runs has a finite value of notes"),
        (["best", finished_run, "--by", "test/horses"], "No run has test/horses."),
    ):
        assert runs.main([str(word) for word in words]) == 1
        assert message in capsys.readouterr().err


def test_endings_are_noted(tmp_path: Path) -> None:
    for error, status, reason in (
        (AgreedExit(143), "stopped", "by signal 15"),
        (KeyboardInterrupt(), "stopped", "by Ctrl-C"),
        (UserError("no horses\nBuy some."), "failed", "no horses"),
        (ZeroDivisionError("by 0"), "failed", "ZeroDivisionError: by 0"),
    ):
        provenance.note(tmp_path, seconds=100.0)
        with suppress(BaseException), provenance.recording(tmp_path):
            provenance.begin(tmp_path)
            raise error
        noted = provenance.read(tmp_path)
        assert (noted["status"], noted["reason"]) == (status, reason)
        assert noted["seconds"] >= 100  # of earlier starts as well


def test_every_start_is_noted_and_shown(finished_run: Path, tmp_path: Path, capsys) -> None:
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True)
    again = copied(finished_run, tmp_path / "again")
    provenance.begin(again)
    shown = {row["name"]: row["value"] for row in rows(capsys, "show", again)}
    assert shown["starts"] == "2"
    assert shown["command"] == shlex.join(sys.orig_argv)
    # Empty where the library is no part of a repository.
    assert shown.get("commit", "") == git.stdout.strip()
