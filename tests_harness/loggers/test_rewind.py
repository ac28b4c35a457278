"""Logs are cut back to a checkpoint: no step is missing, none is there twice, no loss is silent."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from harness.loggers.event_files import read_events
from harness.loggers.metrics_table import MetricsTable
from harness.loggers.rewind import Logs
from tests_harness.loggers.log_damage import OF_A_TABLE, OF_ANY_FILE, damage
from tests_harness.loggers.logged_run import END, attempt, curves, table_of

ONE_HOUR = 3600
IN_BOTH = ("lr", "train/loss", "epoch", "val/accuracy")  # others are in TensorBoard only


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    run_dir = tmp_path_factory.mktemp("whole")
    attempt(run_dir, END)
    return run_dir


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that was killed twice, and the record of its last checkpoint, of step 40."""
    run_dir = tmp_path_factory.mktemp("killed")
    return run_dir, attempt(run_dir, 40, attempt(run_dir, 20), 20)


def copied(killed: tuple[Path, Any], tmp_path: Path) -> tuple[Path, Any]:
    return shutil.copytree(killed[0], tmp_path / "copy"), killed[1]


def is_equal(run_dir: Path, whole: Path) -> bool:
    """Whether a table has the same bytes, and TensorBoard shows the same."""
    tables = [(folder / "metrics.csv").read_bytes() for folder in (run_dir, whole)]
    return tables[0] == tables[1] and curves(run_dir) == curves(whole)


def shown(run_dir: Path) -> dict[str, Any]:
    """Curves in which a point that is there twice, as Lightning logs epochs, counts once."""
    return {tag: list(dict.fromkeys(points)) for tag, points in curves(run_dir).items()}


def in_both(run_dir: Path) -> dict[str, Any]:
    return {tag: points for tag, points in shown(run_dir).items() if tag in IN_BOTH}


def event_files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "tensorboard").iterdir())


def test_killed_run_logs_what_the_whole_one_does(killed, whole, tmp_path: Path, caplog) -> None:
    run_dir, record = copied(killed, tmp_path)
    assert not is_equal(run_dir, whole)
    attempt(run_dir, END, record, 40)
    assert is_equal(run_dir, whole)
    assert len(event_files(run_dir)) == 3
    assert caplog.messages == []


def test_resume_from_an_earlier_checkpoint_takes_out_later_attempts(whole, tmp_path: Path) -> None:
    record = attempt(tmp_path, 20)
    attempt(tmp_path, 40, record, 20)
    attempt(tmp_path, END, record, 20)  # the checkpoint of step 40 was damaged
    assert is_equal(tmp_path, whole)
    assert len(event_files(tmp_path)) == 2


@pytest.mark.parametrize("kind", [*OF_A_TABLE, "deleted"])
def test_damaged_table_comes_back_whole(kind: str, killed, whole, tmp_path: Path) -> None:
    for seed in range(4):
        run_dir, record = copied(killed, tmp_path / str(seed))
        damage(run_dir / "metrics.csv", kind, seed)
        attempt(run_dir, END, record, 40)
        assert is_equal(run_dir, whole)


@pytest.mark.parametrize("kind", [*OF_ANY_FILE, "deleted", "folder deleted"])
def test_damaged_events_come_back_or_are_told(
    kind: str, killed, whole, tmp_path: Path, caplog
) -> None:
    for seed in range(6):
        caplog.clear()
        run_dir, record = copied(killed, tmp_path / str(seed))
        damage(event_files(run_dir)[seed % 2], kind, seed)
        attempt(run_dir, END, record, 40)
        assert table_of(run_dir) == table_of(whole)
        assert in_both(run_dir) == in_both(whole)
        if shown(run_dir) != shown(whole):
            assert "lost: " in caplog.text
            assert "weights" in caplog.text or "throughput" in caplog.text


@pytest.mark.parametrize("kind", [*OF_A_TABLE, "deleted"])
def test_table_without_tensorboard_is_whole_or_its_loss_is_told(
    kind: str, whole, tmp_path: Path, caplog
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    record = attempt(base, 40, attempt(base, 20, tb=False), 20, tb=False)
    for seed in range(2):
        caplog.clear()
        run_dir = shutil.copytree(base, tmp_path / str(seed))
        damage(run_dir / "metrics.csv", kind, seed)
        attempt(run_dir, END, record, 40, tb=False)
        rows = table_of(run_dir)
        assert all(row in table_of(whole) for row in rows)
        num_lost = len(table_of(whole)) - len(rows)
        assert (f"lost: {num_lost} row(s) (steps" in caplog.text) == bool(num_lost)
        assert not list(run_dir.glob("tensorboard/*"))


@pytest.mark.parametrize("kind", [*OF_ANY_FILE, "deleted", "folder deleted"])
def test_tensorboard_without_a_table_is_whole_or_its_loss_is_told(
    kind: str, whole, tmp_path: Path, caplog
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    record = attempt(base, 40, attempt(base, 20, csv=False), 20, csv=False)
    for seed in range(2):
        caplog.clear()
        run_dir = shutil.copytree(base, tmp_path / str(seed))
        damage(event_files(run_dir)[seed % 2], kind, seed)
        attempt(run_dir, END, record, 40, csv=False)
        found, expected = shown(run_dir), shown(whole)
        assert all(point in expected[tag] for tag in found for point in found[tag])
        assert ("lost: " in caplog.text) == (found != expected)
        assert not (run_dir / "metrics.csv").exists()


def test_both_logs_damaged_at_one_place_lose_what_was_there(
    killed, whole, tmp_path: Path, caplog
) -> None:
    run_dir, record = copied(killed, tmp_path)
    table, events = run_dir / "metrics.csv", event_files(run_dir)[0]
    lines = table.read_bytes().split(b"\r\n")
    assert lines[8].startswith(b"7,")
    table.write_bytes(b"\r\n".join([*lines[:8], bytes(len(lines[8])), *lines[9:]]))
    data = events.read_bytes()
    place = data.index(b"train/loss", data.index(b"train/loss", len(data) // 6)) - 30
    events.write_bytes(data[:place] + bytes(8) + data[place + 8 :])
    attempt(run_dir, END, record, 40)
    told = " ".join(caplog.messages)
    assert "1 row(s) (steps 7 to 7) of " in told
    missing = [row for row in table_of(whole) if row not in table_of(run_dir)]
    assert len(missing) <= 1
    assert not missing or "in single precision" in told or "lost: " in told


def test_eight_zero_bytes_cost_a_record_and_the_rest_is_read(tmp_path: Path, caplog) -> None:
    record = attempt(tmp_path, 40, csv=False)
    Logs(tmp_path).rewind(record, 40)
    (path,) = event_files(tmp_path)
    data, before = path.read_bytes(), num_values(tmp_path)
    place = read_events(path)[7].start + 20
    path.write_bytes(data[:place] + bytes(8) + data[place + 8 :])
    assert num_values(tmp_path) < before / 2  # TensorBoard reads no further
    Logs(tmp_path).rewind(record, 40)
    assert num_values(tmp_path) == before - 1
    assert "lost: 1 of " in caplog.text


def num_values(run_dir: Path) -> int:
    return sum(len(points) for points in curves(run_dir).values())


def test_bytes_that_were_put_in_cost_nothing(killed, whole, tmp_path: Path) -> None:
    """What was at the end of the file has moved behind its recorded length."""
    run_dir, record = copied(killed, tmp_path)
    (path, _) = event_files(run_dir)
    place = read_events(path)[7].start
    path.write_bytes(path.read_bytes()[:place] + b"x" * 2000 + path.read_bytes()[place:])
    attempt(run_dir, END, record, 40)
    assert is_equal(run_dir, whole)


def test_column_that_was_deleted_costs_only_its_own_rows(tmp_path: Path, caplog) -> None:
    record = attempt(tmp_path, 40, tb=False)
    path = tmp_path / "metrics.csv"
    last = path.read_text().splitlines()[0].split(",")[-1]
    assert last == "val/accuracy"
    lines = [line.rpartition(",")[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    Logs(tmp_path).rewind(record, 40)
    assert len(table_of(tmp_path)) == 40 - 4
    assert "lost: 4 row(s) (steps 9 to 39)" in caplog.text


def logged_in_double(tmp_path: Path) -> tuple[Path, Any]:
    """A table with a rate that TensorBoard, which keeps single precision, has not."""
    logs, table = Logs(tmp_path), MetricsTable(tmp_path / "metrics.csv")
    logs.begin([table])
    writer = SummaryWriter(str(tmp_path / "tensorboard"))
    for step in range(3):
        table.log_metrics({"loss": 0.5, "lr": 0.1 / 3}, step)
        writer.add_scalar("loss", 0.5, step)
        writer.add_scalar("lr", 0.1 / 3, step)
    writer.close()
    table.write_all()
    return table.path, logs.record()


def test_rounded_numbers_are_told(tmp_path: Path, caplog) -> None:
    path, record = logged_in_double(tmp_path)
    path.unlink()
    Logs(tmp_path).rewind(record, 3)
    assert "3 came back from TensorBoard's files, 3 of them in single precision" in caplog.text
    assert [row["lr"] for row in table_of(tmp_path)] == pytest.approx([0.1 / 3] * 3, rel=1e-7)
    assert [row["loss"] for row in table_of(tmp_path)] == [0.5] * 3


def test_cells_that_are_left_of_a_damaged_row_stay(tmp_path: Path, caplog) -> None:
    path, record = logged_in_double(tmp_path)
    before = path.read_bytes()
    path.write_bytes(before.replace(b",loss", b"").replace(b",0.5", b""))
    Logs(tmp_path).rewind(record, 3)
    assert path.read_bytes() == before
    assert "3 came back from TensorBoard's files." in caplog.text


@pytest.mark.parametrize("shift", [-ONE_HOUR, -20 * 365 * 24 * ONE_HOUR])
def test_clock_that_was_set_back_takes_no_curve(
    shift: int, whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in TensorBoard's own reader, which orders files by name and drops later steps."""
    now = time.time
    record = attempt(tmp_path, 20)
    monkeypatch.setattr(time, "time", lambda: now() + shift)
    record = attempt(tmp_path, 40, record, 20)
    monkeypatch.setattr(time, "time", lambda: now() + 2 * shift)
    attempt(tmp_path, END, record, 40)
    assert is_equal(tmp_path, whole)
    for points in curves(tmp_path).values():
        assert points == sorted(points)
    first_steps = [steps_in(path) for path in event_files(tmp_path)]
    assert first_steps == [0, 20, 40]  # by name


def steps_in(path: Path) -> int:
    """The first step of a file."""
    return min(record.event.step for record in read_events(path)[1:])


def test_files_are_found_by_what_they_hold(killed, whole, tmp_path: Path, caplog) -> None:
    run_dir, record = copied(killed, tmp_path)
    for number, path in enumerate(reversed(event_files(run_dir))):
        path.rename(path.with_name(f"events.out.tfevents.{number}.elsewhere"))
    attempt(run_dir, END, record, 40)
    assert is_equal(run_dir, whole)
    assert caplog.messages == []


def test_damage_is_mended_again_by_a_second_resume(killed, whole, tmp_path: Path) -> None:
    """The first was killed before it came to a checkpoint."""
    run_dir, record = copied(killed, tmp_path)
    for path in (run_dir / "metrics.csv", event_files(run_dir)[0]):
        damage(path, "eight zero bytes", 3)
    attempt(run_dir, 45, record, 40)
    attempt(run_dir, END, record, 40)
    assert table_of(run_dir) == table_of(whole)
    assert in_both(run_dir) == in_both(whole)


def test_files_below_are_cut_as_well(tmp_path: Path) -> None:
    """As those of add_scalars are, which have folders of their own."""
    logs = Logs(tmp_path)
    writer = SummaryWriter(str(tmp_path / "tensorboard"))
    for step in range(10):
        writer.add_scalars("loss", {"train": 0.5}, step)
        if step == 5:
            writer.flush()
            record = logs.record()
    writer.close()
    Logs(tmp_path).rewind(record, 6)
    (below,) = (path for path in (tmp_path / "tensorboard").iterdir() if path.is_dir())
    shutil.copytree(below, tmp_path / "alone" / "tensorboard")
    assert [step for step, _ in curves(tmp_path / "alone")["loss"]] == list(range(6))


def test_steps_of_another_kind_are_kept(tmp_path: Path) -> None:
    """A module may count samples: what it logged before the checkpoint stays."""
    logs = Logs(tmp_path)
    writer = SummaryWriter(str(tmp_path / "tensorboard"))
    for step in range(10):
        writer.add_scalar("loss", 0.5, step * 64)
        if step == 5:
            writer.flush()
            record = logs.record()
    writer.close()
    Logs(tmp_path).rewind(record, 6)
    assert [step for step, _ in curves(tmp_path)["loss"]] == [step * 64 for step in range(6)]


def test_name_in_a_checkpoint_leads_nowhere_else(tmp_path: Path) -> None:
    record = attempt(tmp_path / "run", 20)
    record["events"][0] |= {"name": "../../other", "crc32": 0}
    (tmp_path / "other").write_text("mine")
    Logs(tmp_path / "run").rewind(record, 20)
    assert (tmp_path / "other").read_text() == "mine"


def test_record_of_an_empty_table_takes_out_later_rows(tmp_path: Path) -> None:
    record = attempt(tmp_path, 0)
    assert table_of(tmp_path) != []
    Logs(tmp_path).rewind(record, 0)
    assert table_of(tmp_path) == []


class TestWithoutARecord:
    """Checkpoints of older versions have none."""

    def test_killed_run_goes_on(self, killed, whole, tmp_path: Path, caplog) -> None:
        run_dir, _ = copied(killed, tmp_path)
        Logs(run_dir).rewind(None, 40)
        assert len(table_of(run_dir)) == 40
        found = curves(run_dir)
        assert found["train/loss"] == curves(whole)["train/loss"][:40]
        assert len(found["weights"]) == 4
        assert caplog.messages == []

    def test_table_keeps_the_rows_before_the_step(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.csv"
        path.write_text("step,loss\n0,3.5\n9,2.5\n10,1.5\n1")  # the last row was cut off
        Logs(tmp_path).rewind(None, 10)
        assert path.read_text().splitlines() == ["step,loss", "0,3.5", "9,2.5"]
        table = MetricsTable(path)
        table.log_metrics({"loss": 1.5}, 10)
        table.finalize("success")
        assert path.read_text().splitlines()[-1] == "10,1.5"

    @pytest.mark.parametrize(
        "tail", [b"\0\0\0\0\n", b"7,\xff\xfe\n8,1,2\n,\n", b"junk\n10,1.0\n-3,1.0\n"]
    )
    def test_damaged_rows_are_taken_out(self, tail: bytes, tmp_path: Path, caplog) -> None:
        path = tmp_path / "metrics.csv"
        path.write_bytes(b"step,loss\r\n0,3.5\r\n" + tail)
        Logs(tmp_path).rewind(None, 7)
        assert path.read_text().splitlines() == ["step,loss", "0,3.5"]
        assert "damaged rows were taken out" in caplog.text

    def test_table_that_has_lost_its_columns_is_set_aside(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.csv").write_bytes(b"\0" * 100 + b"\n")
        Logs(tmp_path).rewind(None, 7)
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv.damaged"]

    @pytest.mark.parametrize(
        "tail", [b"\0" * 4096, b"\xff" * 100, bytes(range(256)), b"\5" + b"\0" * 30]
    )
    def test_curves_with_a_damaged_tail_are_cut_before_it(
        self, tail: bytes, tmp_path: Path
    ) -> None:
        attempt(tmp_path, END, csv=False)
        (path,) = event_files(tmp_path)
        before = path.read_bytes()
        path.write_bytes(before + tail)
        Logs(tmp_path).rewind(None, END)
        assert path.read_bytes() == before

    def test_damage_inside_is_told_and_what_is_behind_it_stays(
        self, tmp_path: Path, caplog
    ) -> None:
        attempt(tmp_path, END, csv=False)
        (path,) = event_files(tmp_path)
        before = curves(tmp_path)
        place = path.read_bytes().index(b"train/loss", 3000)
        path.write_bytes(path.read_bytes()[:place] + bytes(8) + path.read_bytes()[place + 8 :])
        Logs(tmp_path).rewind(None, END)
        found = curves(tmp_path)
        assert "is damaged at 1 places" in caplog.text
        num_lost = [len(before[tag]) - len(found[tag]) for tag in before]
        assert sorted(num_lost)[-2:] == [0, 1]

    def test_file_that_is_being_written_is_left_alone(self, tmp_path: Path) -> None:
        """A run opens its own before it knows where it goes on."""
        attempt(tmp_path, 20)
        logs = Logs(tmp_path)
        writer = SummaryWriter(str(tmp_path / "tensorboard"), filename_suffix=".mine")
        writer.add_scalar("loss", 0.5, 0)
        writer.flush()
        logs.rewind(None, 0)
        (mine,) = event_files(tmp_path)
        assert mine.name.endswith(".mine")

    def test_no_logs_are_no_trouble(self, tmp_path: Path) -> None:
        Logs(tmp_path).rewind(None, 0)
        assert list(tmp_path.iterdir()) == []
