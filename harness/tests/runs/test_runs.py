"""``scripts/runs.py``: runs in any state are listed, found and compared."""

import json
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from harness import UserError, record
from harness.checkpoints.lookup import by_step
from harness.errors import AgreedExit
from harness.runs import __main__ as runs
from harness.runs import reading, table
from tests.conftest import ROOT


def copied(trained: Path, folder: Path, *changes: tuple[str, str]) -> Path:
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


def test_a_finished_run_is_listed_with_what_it_has_reached(trained: Path, capsys) -> None:
    (row,) = json.loads(answer(capsys, "ls", trained.parent, "--json"))
    results = json.loads((trained / "results.json").read_text())
    assert row["status"] == "finished"
    assert row["run"] == str(trained)
    assert row["test/accuracy"] == results["test/accuracy"]
    values = reading.read(trained).table["val/accuracy"].drop_nulls().to_list()
    assert row["best"] == pytest.approx(max(values))
    assert row["samples/s"] > 0
    assert row["seconds"] > 0


def test_every_other_state_is_named_with_its_reason(trained: Path, tmp_path: Path, capsys) -> None:
    for name in ("running", "killed", "failed", "damaged", "damaged results"):
        folder = copied(trained, tmp_path / name)
        if name == "damaged results":
            (folder / "results.json").write_text("{")
            continue
        (folder / "results.json").unlink()
        record.note(folder, status=None, reason=None)
    record.note(tmp_path / "failed", status="failed", reason="ValueError: no horses")
    (tmp_path / "damaged" / "config.yaml").write_text("data: [")
    lock = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); "
    lock += "print(flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", lock, str(tmp_path / "running" / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        rows = json.loads(answer(capsys, "ls", tmp_path, "--json"))
    finally:
        holder.communicate()
    told = {Path(row["run"]).name: (row["status"], row["reason"]) for row in rows}
    assert told["running"] == ("running", None)
    last = by_step(trained / "checkpoints")[-1].stem
    assert told["killed"] == ("stopped", f"killed after {last}")
    assert told["failed"] == ("failed", "ValueError: no horses")
    assert told["damaged"] == ("damaged", "config.yaml cannot be read")
    assert told["damaged results"] == ("damaged", "results.json cannot be read")


def test_seeds_and_folds_are_one_row_with_an_interval(
    trained: Path, tmp_path: Path, capsys
) -> None:
    values = {"a": (1, 0, 0.003, 0.8), "b": (2, 0, 0.003, 0.9), "c": (1, 1, 0.003, 1.0)}
    values["d"] = (1, 0, 0.03, 0.95)
    for name, (seed, fold, lr, value) in values.items():
        folder = copied(
            trained,
            tmp_path / name,
            ("lr: 0.003", f"lr: {lr}"),
            ("\nseed: 1\n", f"\nseed: {seed}\n"),
            ("\ndata:\n", f"\ndata:\n  fold: {fold}\n"),
        )
        (folder / "results.json").write_text(json.dumps({"test/accuracy": value}))
    rows = json.loads(answer(capsys, "best", tmp_path, "--by", "test/accuracy", "--json"))
    assert [row["runs"] for row in rows] == [1, 3]
    assert rows[0]["model.optimizer.lr"] == 0.03
    assert rows[0]["± 95 %"] is None
    assert rows[1]["test/accuracy"] == pytest.approx(0.9)
    deviation = 4.30265 * 0.1 / 3**0.5  # t of 2 degrees of freedom
    assert rows[1]["± 95 %"] == pytest.approx(deviation, rel=1e-4)


def test_runs_that_are_equal_but_for_their_folder_are_both_shown(
    trained: Path, tmp_path: Path, capsys
) -> None:
    for name in ("a", "b"):
        copied(trained, tmp_path / name)
    rows = json.loads(answer(capsys, "best", tmp_path, "--json"))
    assert {Path(row["best run"]).name for row in rows} == {"a", "b"}
    copied(trained, tmp_path / "c", ("objective: val/accuracy", "objective: val/loss"))
    assert runs.main(["best", str(tmp_path)]) == 1
    assert "2 objectives. Add --by METRIC." in capsys.readouterr().err


def test_difference_is_what_differs_alone(trained: Path, tmp_path: Path, capsys) -> None:
    other = copied(trained, tmp_path / "other", ("lr: 0.003", "lr: 0.004"))
    rows = json.loads(answer(capsys, "diff", trained, other, "--json"))
    keys = {row["name"] for row in rows}
    assert keys == {"model.optimizer.lr", "model.scheduler.max_lr"}
    assert {row["two"] for row in rows} == {0.004}
    assert "same" in answer(capsys, "diff", trained, copied(trained, tmp_path / "twin"))
    lines = [line.split() for line in answer(capsys, "diff", trained, other).splitlines()]
    assert ["model.optimizer.lr", "0.003", "0.004"] in lines


def test_show_and_tables_for_a_person_hold_the_same(
    trained: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracy = json.loads((trained / "results.json").read_text())["test/accuracy"]
    for words in (("show", trained), ("ls", trained), ("best", trained, "--by", "test/accuracy")):
        assert f"{accuracy:.4g}" in answer(capsys, *words)
    # Of experiments that differ in much, a list shows what fits on the screen.
    for number in range(2):
        changes = [(key, f"{key}{number}") for key in ("lr: 0.003", "num_test: 360", "blur: 0.5")]
        copied(trained, tmp_path / str(number), *changes)
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.chdir(tmp_path)
    said = answer(capsys, "ls", ".").splitlines()
    assert said[0].split()[:3] == ["run", "status", "objective"]
    assert max(map(len, said)) <= 70
    assert "more columns" in said[-1]


def test_conditions_choose_runs_by_settings_results_and_tags(trained: Path, tmp_path: Path) -> None:
    run = reading.read(copied(trained, tmp_path / "run", ("tags: []", "tags: [baseline, first]")))
    for condition, is_found in {
        "status=finished": True,
        "test/accuracy>=0": True,
        "model.optimizer.lr<0.003": False,
        "data.max_samples_per_device=null": True,
        "hidden=[128,64]": True,
        "hidden=128,32": False,
        "tags=baseline": True,
        "tags!=first": False,
    }.items():
        with nullcontext() if is_found else pytest.raises(UserError, match="0 of 1"):
            table.chosen([run], [condition])


def test_mistakes_are_told_in_a_line(trained: Path, tmp_path: Path, capsys) -> None:
    twin = copied(trained, tmp_path / "copies" / "twin", ("seed: 1", "seed: 7"))
    (tmp_path / "none").mkdir()
    for words, message in (
        (["ls", "nowhere"], "nowhere is no folder"),
        (["ls", tmp_path / "none"], "There is no run"),
        (["ls", trained, "--filter", "statu=1"], "No run has statu. Did you mean status?"),
        (["ls", trained, "--filter", "status"], "write a condition as status=finished"),
        (["diff", trained], "diff takes 2"),
        (["diff", trained, twin, "--filter", "seed=7"], "diff takes 2"),
        (["best", trained, "--by", "notes"], "None of 1 runs has a value of notes"),
        (["best", trained, "--by", "test/horses"], "No run has test/horses."),
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
        record.note(tmp_path, seconds=100.0)
        with suppress(BaseException), record.recording(tmp_path):
            record.begin(tmp_path)
            raise error
        noted = record.read(tmp_path)
        assert (noted["status"], noted["reason"]) == (status, reason)
        assert noted["seconds"] >= 100  # of earlier starts as well


def test_every_start_is_noted_and_shown(trained: Path, tmp_path: Path, capsys) -> None:
    (first,) = record.read(trained)["starts"]
    assert first["command"] == shlex.join(sys.orig_argv)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True)
    commit = git.stdout.strip()  # empty where the library is no part of a repository
    assert (first["commit"] or "") == commit
    again = copied(trained, tmp_path / "again")
    with record.recording(again):
        record.begin(again)
    shown = {
        row["name"]: row["value"] for row in json.loads(answer(capsys, "show", again, "--json"))
    }
    assert shown["starts"] == "2"
    assert shown["command"] == first["command"]
    assert commit[:10] in answer(capsys, "show", trained)
