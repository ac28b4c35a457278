"""``scripts/runs.py report``: what the page holds."""

import json
import re
from html import unescape
from pathlib import Path

import pytest

from harness import compare as runs
from harness import provenance
from harness.runs import reading, report
from tests.runs.test_runs import copied

pytest.importorskip("plotly")
EVIL = "</script><img src=x onerror=alert(1)><!-- &amp; \u2028"


@pytest.fixture(scope="module")
def folder(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs: three that differ in settings, a failed and a damaged one; two have evil names."""
    folder = tmp_path_factory.mktemp("runs")
    for name, lr, dropout in (("a", "0.005", "0.0"), ("<i>b", "0.03", "0.0"), ("c", "0.3", "0.5")):
        changes = ("lr: 0.005", f"lr: {lr}"), ("dropout: 0.0", f"dropout: {dropout}")
        copied(finished_run, folder / name, *changes)
    failed = copied(finished_run, folder / "failed")
    (failed / "results.json").unlink()
    provenance.note(failed, status="failed", reason=EVIL)
    damaged = copied(finished_run, folder / "damaged")
    (damaged / "config.yaml").write_text("data: [")
    assert runs.main(["report", str(folder), "-o", str(folder / "page.html")]) == 0
    return folder


def test_the_page_holds_results_and_settings_and_a_run_says_no_html(folder: Path) -> None:
    page = (folder / "page.html").read_text()
    assert "gpu_gib" not in page  # of runs without a GPU
    found: dict[str, dict[str, str]] = {}
    for table in re.findall("<table>(.*?)</table>", page, re.DOTALL):
        lines = [re.findall("<td>(.*?)</td>", row) for row in table.split("</tr>")[:-1]]
        head, *rows = ([*map(unescape, cells)] for cells in lines)
        found |= {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert found.keys() == {"a", "<i>b", "c", "failed", "damaged"}
    assert (found["<i>b"]["lr"], found["c"]["dropout"]) == ("0.03", "0.5")
    accuracy = json.loads((folder / "a" / "results.json").read_text())["test/accuracy"]
    assert found["a"]["test/accuracy"] == f"{accuracy:.4g}"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", found["a"]["started"])
    assert "mode" not in found["a"]  # stands above the table
    assert found["failed"]["reason"] == EVIL
    assert found["damaged"]["status"] == "damaged"
    for text in ("<i>", "\\u003ci\\u003e", "<img src=x"):  # as HTML, and in plotly's JSON
        assert text not in page
    assert "default-src 'none'" in page
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:)', page)


def test_curves_hold_what_was_logged_and_the_objective_comes_first(folder: Path) -> None:
    names = ["a", "c", "<i>b"]
    found = reading.find([folder / name for name in names])
    first, *_ = report.curves_of(found, names)
    assert first["layout"] == {"title": {"text": "val/accuracy"}, "showlegend": True}
    assert [curve["name"] for curve in first["data"]] == names
    points = reading.read_table(folder / "a" / "metrics.csv").drop_nulls("val/accuracy")
    assert first["data"][0]["x"] == points["step"].to_list()
    assert first["data"][0]["y"] == points["val/accuracy"].to_list()
    figures = {each["layout"]["title"]["text"]: each for each in report.scatter_of(found, names)}
    lr = figures["best val/accuracy against model.optimizer.lr"]
    assert lr["data"][0]["x"] == [0.005, 0.3, 0.03]
    assert lr["layout"]["xaxis"]["type"] == "log"


def test_a_figure_of_many_runs_has_the_curves_of_the_best_ones_and_no_legend(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("worst", 0.1), ("best", 0.9), ("second", 0.8)):
        provenance.note(copied(finished_run, tmp_path / name), best=value)
    monkeypatch.setattr(report, "MAX_CURVES", 2)
    monkeypatch.setattr(report, "MAX_NAMED", 1)
    assert runs.main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    title = "val\\u002faccuracy (the best 2 of 3 runs)"
    (figure,) = (part for part in page.split("Plotly.newPlot(") if title in part)
    assert re.findall(r'"name":"(\w+)"', figure) == ["best", "second"]
    assert '"showlegend":false' in figure
    assert ">worst<" in page


def test_another_file_is_kept_and_an_older_report_is_replaced(
    finished_run: Path, tmp_path: Path, capsys
) -> None:
    page = tmp_path / "page.html"
    page.write_text("my notes")
    assert runs.main(["report", str(finished_run), "-o", str(page)]) == 1
    assert (
        "exists, but is not a report of runs. Remove the file, or choose another with -o"
        in capsys.readouterr().err
    )
    assert page.read_text() == "my notes"
    page.unlink()
    for _ in range(2):
        assert runs.main(["report", str(finished_run), "-o", str(page)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
