import csv
from pathlib import Path

import pytest

from harness.loggers import metrics_table, prediction_table
from harness.loggers.metrics_table import MetricsTable


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_metrics_of_one_step_share_a_row(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "metrics.csv")
    table.log_metrics({"loss": 0.5}, step=1)
    table.log_metrics({"lr": 0.1}, step=1)
    table.log_metrics({"loss": 0.25}, step=2)
    table.save()
    assert not table.path.exists()  # not every time
    table.written_time -= 1
    table.save()
    assert rows(table.path) == [{"step": "1", "loss": "0.5", "lr": "0.1"}]
    table.finalize("success")
    assert [row["loss"] for row in rows(table.path)] == ["0.5", "0.25"]


def test_rows_that_could_not_be_written_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the logger tries again, and a checkpoint records each row once."""
    table = MetricsTable(tmp_path / "metrics.csv")
    table.log_metrics({"loss": 0.5}, step=1)
    monkeypatch.setattr(metrics_table, "write_durably", None)  # fails where it is called
    with pytest.raises(TypeError):
        table.write_all()
    monkeypatch.undo()
    table.write_all()
    assert len(rows(table.path)) == 1


def test_a_table_of_any_size_is_cut(tmp_path: Path) -> None:
    """``runs.py`` reads 8 million cells at most, but a run that was longer can be resumed."""
    path, num_columns = tmp_path / "metrics.csv", 9000
    header = ",".join(["step", *map(str, range(num_columns))])
    path.write_text(
        "\n".join([header, *(f"{i},{i}" + "," * (num_columns - 1) for i in range(1000))])
    )
    assert metrics_table.cut(path, 999) == 999
    columns, kept = metrics_table.read(path)
    assert (columns, kept[-1], len(kept)) == (["step", "0"], {"step": "998", "0": "998"}, 999)


def test_predictions_are_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    prediction_table.write(path, {(0, 0): {"a": "-1", "b": -1.5, "c": "@x"}}, {"d": ["+2"]})
    assert path.read_text().splitlines() == ["sample,d,a,b,c", "0,+2,-1,-1.5,@x"]
