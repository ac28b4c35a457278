"""``scripts/runs.py``: runs of any state and version are listed, found and compared."""

import csv
import fcntl
import io
import json
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from harness import UserError, record, train
from harness.processes.leaving import AgreedExit
from harness.runs import comparing, reading
from tests_harness.conftest import ROOT

OLDER = ROOT / "tests_harness" / "runs" / "before_two_rooms"
WORDS = ["experiment=synthetic", "strategy=cpu", "trainer.max_epochs=2", "data.num_train=128"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("outputs")
    return train(*WORDS, f"output_dir={output}", conf=ROOT / "conf").folder


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


def test_runs_of_an_older_version_are_read(capsys) -> None:
    (row,) = json.loads(answer(capsys, "ls", OLDER, "--json"))
    assert row["status"] == "finished"
    assert row["best"] == pytest.approx(0.1)


def test_seeds_are_one_row_with_an_interval(trained: Path, tmp_path: Path, capsys) -> None:
    values = {"a": (1, 0.003, 0.8), "b": (2, 0.003, 0.9), "c": (1, 0.03, 0.95)}
    for name, (seed, lr, value) in values.items():
        folder = copied(
            trained,
            tmp_path / name,
            ("lr: 0.003", f"lr: {lr}"),
            ("\nseed: 1\n", f"\nseed: {seed}\n"),
        )
        (folder / "results.json").write_text(json.dumps({"test/accuracy": value}))
    rows = json.loads(answer(capsys, "best", tmp_path, "--by", "test/accuracy", "--json"))
    assert [row["seeds"] for row in rows] == [1, 2]
    assert rows[0]["model.optimizer.lr"] == 0.03
    assert rows[0]["± 95 %"] is None
    assert rows[1]["test/accuracy"] == pytest.approx(0.85)
    assert rows[1]["± 95 %"] == pytest.approx(12.7062 * 0.05, rel=1e-4)  # t of 1 degree of freedom


def test_a_seed_that_was_run_again_counts_once(trained: Path, tmp_path: Path, capsys) -> None:
    for name, value in (("first", 0.8), ("again", 0.9)):
        folder = copied(trained, tmp_path / name)
        (folder / "results.json").write_text(json.dumps({"test/accuracy": value}))
    words = folder / "overrides.yaml"
    words.write_text(words.read_text().replace("# started 2", "# started 3"))  # later
    (row,) = json.loads(answer(capsys, "best", tmp_path, "--by", "test/accuracy", "--json"))
    assert (row["seeds"], row["test/accuracy"], row["± 95 %"]) == (1, 0.9, None)


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


@pytest.mark.parametrize(
    ("condition", "is_found"),
    [
        ("status=finished", True),
        ("status!=finished", False),
        ("test/accuracy>=0", True),
        ("model.optimizer.lr<0.003", False),
        ("model.scheduler_interval=step", True),
        ("data.max_samples_per_device=null", True),
        ("lr=0.003", True),
        ("hidden=[128,64]", True),
        ("hidden=128, 64", True),
        ("hidden=128,32", False),
    ],
)
def test_conditions(trained: Path, condition: str, is_found: bool) -> None:
    assert bool(comparing.chosen([reading.read(trained)], [condition])) == is_found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "nowhere"], "nowhere is no folder"),
        (["ls", "{empty}"], "There is no run"),
        (["ls", "{run}", "--filter", "lrs=1"], "no run has lrs. It may be"),
        (["ls", "{run}", "--filter", "lr"], "write a condition as"),
        (["diff", "{run}"], "diff takes 2"),
        (["best", "{run}", "--by", "test/horses"], "None of 1 runs has a value of test/horses"),
    ],
)
def test_mistakes_are_told_in_a_line(
    words: list[str], message: str, trained: Path, tmp_path: Path, capsys
) -> None:
    assert runs.main([word.format(run=trained, empty=tmp_path) for word in words]) == 1
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


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (AgreedExit(143), "stopped", "by signal 15"),
        (KeyboardInterrupt(), "stopped", "by Ctrl-C"),
        (UserError("no horses\nBuy some."), "failed", "no horses"),
        (ZeroDivisionError("by 0"), "failed", "ZeroDivisionError: by 0"),
    ],
)
def test_endings_are_noted(error: BaseException, status: str, reason: str, tmp_path: Path) -> None:
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
    assert first["commit"] == record.checked_out()
    again = copied(trained, tmp_path / "again")
    with record.recording(again):
        pass
    assert len(record.read(again)["starts"]) == 2
    (shown,) = json.loads(answer(capsys, "show", again, "--json"))
    assert shown["starts"] == 2
    assert shown["command"] == first["command"]
    assert shown["words"].split()[: len(WORDS)] == WORDS
    assert platform.node() in answer(capsys, "show", trained)
    (again / "record.json").unlink()  # as an older version leaves it
    (again / "overrides.yaml").unlink()
    assert "host" not in answer(capsys, "show", again)


def test_a_changed_file_makes_a_tree_dirty(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.is_dirty() is None  # no repository
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    Path("code.py").write_text("1")
    for words in (["init", "-q"], ["add", "code.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    Path("output.txt").write_text("what git does not know")
    assert record.is_dirty() is False
    Path("code.py").write_text("2")
    assert record.is_dirty() is True
    monkeypatch.setenv("PATH", "")
    assert record.is_dirty() is None  # no git


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
