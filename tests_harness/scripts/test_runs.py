"""``scripts/runs.py``: runs in any state are listed, found and compared."""

import csv
import fcntl
import io
import json
import platform
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import runs

from harness import UserError, record
from harness.processes.leaving import AgreedExit
from harness.runs import comparing, reading
from tests_harness.conftest import ROOT
from tests_harness.scripts.conftest import WORDS


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
    values = [v for _, v in reading.read(trained).curves["val/accuracy"]]
    assert row["best"] == pytest.approx(max(values))
    assert row["samples/s"] > 0
    assert "bound" in row["held back by"]
    assert row["seconds"] > 0


def test_every_other_state_is_named_with_its_reason(trained: Path, tmp_path: Path, capsys) -> None:
    for name in ("running", "killed", "failed", "damaged"):
        folder = copied(trained, tmp_path / name)
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
    step = reading.read(trained).step
    assert told["running"] == ("running", "")
    assert told["killed"] == ("stopped", f"killed after step {step}")
    assert told["failed"] == ("failed", "ValueError: no horses")
    assert told["damaged"][0] == "damaged"
    assert "config.yaml cannot be read" in told["damaged"][1]


def test_asking_for_a_lock_does_not_take_it(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as file:
        assert not reading.is_locked(tmp_path / ".lock")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
    (tmp_path / "d" / "results.json").write_text('{"test/accuracy": 0.5}')
    again = copied(tmp_path / "d", tmp_path / "again")  # counts once, as it was run last
    (again / "results.json").write_text('{"test/accuracy": 0.6}')
    words = again / "overrides.yaml"
    words.write_text(words.read_text().replace("# started 2", "# started 3"))
    rows = json.loads(answer(capsys, "best", tmp_path, "--by", "test/accuracy", "--json"))
    assert [(row["runs"], row["test/accuracy"]) for row in rows] == [
        (3, pytest.approx(0.9)),
        (1, 0.6),
    ]


def test_each_of_several_tags_is_found(trained: Path, tmp_path: Path) -> None:
    run = reading.read(copied(trained, tmp_path / "run", ("tags: []", "tags: [baseline, first]")))
    assert comparing.chosen([run], ["tags=baseline"]) == [run]
    assert comparing.chosen([run], ["tags!=first"]) == []
    assert comparing.chosen([run], ["tags=last"]) == []


def test_difference_is_what_differs_alone(trained: Path, tmp_path: Path, capsys) -> None:
    other = copied(trained, tmp_path / "other", ("lr: 0.003", "lr: 0.004"))
    rows = json.loads(answer(capsys, "diff", trained, other, "--json"))
    keys = {row[""] for row in rows}
    assert keys == {"model.optimizer.lr", "model.scheduler.max_lr"}
    assert {row["two"] for row in rows} == {0.004}
    assert "same" in answer(capsys, "diff", trained, copied(trained, tmp_path / "twin"))


def test_settings_that_are_taken_from_others_are_no_columns(trained: Path, tmp_path: Path) -> None:
    """As a schedule's largest rate, and the data's seed; two runs may agree by chance."""
    runs = []
    for lr, seed in ((0.01, 5), (0.02, 6), (0.03, 5)):
        changes = ("lr: 0.003", f"lr: {lr}"), ("seed: 1\n", f"seed: {seed}\n")
        runs.append(reading.read(copied(trained, tmp_path / str(lr), *changes)))
    assert {run.settings["data.seed"] for run in runs} == {5, 6}
    assert comparing.differing(runs) == ["model.optimizer.lr", "seed"]
    assert "model.scheduler.max_lr" in comparing.differing(runs[:2])


def test_best_by_the_objective_is_the_best_value(trained: Path, tmp_path: Path, capsys) -> None:
    """Not the last epoch's, which results.json has: ls and the report show the same."""
    folder = copied(trained, tmp_path / "run")
    run = reading.read(folder)
    assert run.objective
    (folder / "results.json").write_text(json.dumps({run.objective: -5.0}))
    (row,) = json.loads(answer(capsys, "best", folder, "--by", run.objective, "--json"))
    assert run.best in row.values()
    assert -5.0 not in row.values()


def test_a_run_is_as_good_beside_those_of_another_objective(
    trained: Path, tmp_path: Path, capsys
) -> None:
    run = reading.read(trained)
    other = (f"objective: {run.objective}", "objective: val/other")
    copied(trained, tmp_path / "other", other, ("lr: ", "lr: 1"))
    (tmp_path / "other" / "results.json").write_text("{}")
    (tmp_path / "other" / "metrics.csv").unlink()
    words = ("--by", run.objective, "--json")
    (alone,) = json.loads(answer(capsys, "best", trained, *words))
    (beside,) = json.loads(answer(capsys, "best", trained, tmp_path, *words))
    assert alone["best"] == beside[run.objective] == run.best
    assert alone.keys() - {"best"} == beside.keys() - {run.objective}  # no column of the other


def test_show_and_tables_for_a_person_hold_the_same(trained: Path, capsys) -> None:
    accuracy = json.loads((trained / "results.json").read_text())["test/accuracy"]
    for words in (("show", trained), ("ls", trained), ("best", trained, "--by", "test/accuracy")):
        assert f"{accuracy:.4g}" in answer(capsys, *words)
    (row,) = csv.DictReader(io.StringIO(answer(capsys, "ls", trained, "--csv")))
    assert float(row["test/accuracy"]) == accuracy


def test_conditions(trained: Path) -> None:
    for condition, is_found in {
        "status=finished": True,
        "status!=finished": False,
        "test/accuracy>=0": True,
        "model.optimizer.lr<0.003": False,
        "data.max_samples_per_device=null": True,
        "lr=0.003": True,
        "hidden=[128,64]": True,
        "hidden=128, 64": True,
        "hidden=128,32": False,
    }.items():
        assert bool(comparing.chosen([reading.read(trained)], [condition])) == is_found, condition


def test_mistakes_are_told_in_a_line(trained: Path, tmp_path: Path, capsys) -> None:
    for words, message in (
        (["ls", "nowhere"], "nowhere is no folder"),
        (["ls", tmp_path], "There is no run"),
        (["ls", trained, "--filter", "lrs=1"], "no run has lrs. It may be"),
        (["ls", trained, "--filter", "lr"], "write a condition as"),
        (["diff", trained], "diff takes 2"),
        (["best", trained, "--by", "test/horses"], "None of 1 runs has a value of test/horses"),
    ):
        assert runs.main([str(word) for word in words]) == 1
        assert message in capsys.readouterr().err


def test_order(trained: Path, tmp_path: Path) -> None:
    folders = [
        copied(trained, tmp_path / str(seed), ("\nseed: 1\n", f"\nseed: {seed}\n"))
        for seed in (3, 1, 2)
    ]
    found = [reading.read(folder) for folder in folders]
    assert [run.settings["seed"] for run in comparing.in_order(found, "seed")] == [1, 2, 3]
    assert [run.settings["seed"] for run in comparing.in_order(found, "seed", True)] == [3, 2, 1]
    found[1].record["samples_per_second"] = 1.0
    assert comparing.in_order(found, "samples/s")[0] is found[1]


def test_endings_are_noted(tmp_path: Path) -> None:
    for error, status, reason in (
        (AgreedExit(143), "stopped", "by signal 15"),
        (KeyboardInterrupt(), "stopped", "by Ctrl-C"),
        (UserError("no horses\nBuy some."), "failed", "no horses"),
        (ZeroDivisionError("by 0"), "failed", "ZeroDivisionError: by 0"),
    ):
        record.note(tmp_path, seconds=100.0, best=1.0)
        with pytest.raises(type(error)), record.recording(tmp_path):
            raise error
        noted = record.read(tmp_path)
        assert (noted["status"], noted["reason"], noted["best"]) == (status, reason, 1.0)
        assert noted["seconds"] >= 100  # of earlier starts as well


def test_every_start_is_noted_and_shown(trained: Path, tmp_path: Path, capsys) -> None:
    (first,) = record.read(trained)["starts"]
    assert first["command"] == shlex.join(sys.orig_argv)
    assert (first["host"], first["python"]) == (platform.node(), platform.python_version())
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    assert first["commit"] == commit
    again = copied(trained, tmp_path / "again")
    with record.recording(again):
        pass
    assert len(record.read(again)["starts"]) == 2
    (shown,) = json.loads(answer(capsys, "show", again, "--json"))
    assert shown["starts"] == 2
    assert shown["command"] == first["command"]
    assert shown["words"].split()[: len(WORDS)] == WORDS
    told = answer(capsys, "show", trained)
    assert platform.node() in told
    assert f"torch {metadata.version('torch')}" in told
    assert "harness " in told  # a checksum
    assert commit[:10] in told


def test_nothing_heavy_is_imported(trained: Path) -> None:
    code = "import runs, sys; runs.main(['ls', sys.argv[1]]); runs.main(['show', sys.argv[1]]); "
    code += (
        "sys.exit(', '.join(n for n in ('torch', 'hydra', 'omegaconf') if n in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(trained)],
        cwd=ROOT / "scripts", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
