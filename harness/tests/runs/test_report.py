"""``scripts/runs.py report``: what the page holds."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness import record
from harness.runs import __main__ as runs
from harness.runs import reading, report
from tests.runs.test_runs import copied

pytest.importorskip("plotly")
EVIL = "</script><img src=x onerror=alert(1)><!-- &amp; \u2028"


class Blocks(HTMLParser):
    """A page's tags, all addresses that they name, and its tables as rows of cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(v) for name, v in attrs if name in ("src", "href")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] in (["td"], ["th"]):
            self.tables[-1][-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")


@pytest.fixture(scope="module")
def folder(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs: three that differ in settings, a failed and a damaged one; two have evil names."""
    folder = tmp_path_factory.mktemp("runs")
    for name, lr, dropout in (("a", "0.003", "0.0"), ("<b>b", "0.03", "0.0"), ("c", "0.3", "0.5")):
        changes = ("lr: 0.003", f"lr: {lr}"), ("dropout: 0.0", f"dropout: {dropout}")
        copied(trained, folder / name, *changes)
    failed = copied(trained, folder / "failed")
    (failed / "results.json").unlink()
    record.note(failed, status="failed", reason=EVIL)
    (failed / "metrics.csv").write_text("step,val/accuracy\n1,nan\n2,0.5\n3,inf\nx,y")
    damaged = copied(trained, folder / "damaged")
    (damaged / "config.yaml").write_text("data: [")
    assert runs.main(["report", str(folder), "-o", str(folder / "page.html")]) == 0
    return folder


def test_the_page_holds_results_settings_and_pictures(folder: Path) -> None:
    page = Blocks((folder / "page.html").read_text())
    table = {}
    for head, *rows in page.tables:
        table |= {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert table.keys() == {"a", "<b>b", "c", "failed", "damaged"}
    assert table["<b>b"]["lr"] == "0.03"
    assert table["c"]["dropout"] == "0.5"
    accuracy = json.loads((folder / "a" / "results.json").read_text())["test/accuracy"]
    assert table["a"]["test/accuracy"] == f"{accuracy:.4g}"
    assert table["failed"]["reason"] == EVIL
    assert table["damaged"]["status"] == "damaged"
    assert "cannot be read" in table["damaged"]["reason"]


def test_the_page_names_no_other_file_and_what_a_run_says_is_never_html(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    page = Blocks(text)
    assert all(address.startswith("data:") for address in page.addresses)
    assert "default-src 'none'" in text
    assert "<b>" not in text
    assert "<img src=x" not in text


def test_curves_hold_what_was_logged(folder: Path) -> None:
    found = [reading.read(folder / name) for name in ("a", "c", "failed")]
    figure = report.curves_of(found, ["a", "c", "failed"])
    assert figure["layout"]["updatemenus"][0]["buttons"][0]["label"] == "val/accuracy"
    traces = [trace for trace in figure["data"] if trace.get("visible", True)]
    assert [trace["name"] for trace in traces] == ["a", "c", "failed"]
    points = found[0].table.select("step", "val/accuracy").drop_nulls()
    assert traces[0]["x"] == points["step"].to_list()
    assert traces[0]["y"] == points["val/accuracy"].to_list()


def test_another_file_is_kept_and_mistakes_are_told_in_a_line(
    trained: Path, tmp_path: Path, capsys
) -> None:
    page = tmp_path / "page.html"
    page.write_text("my notes")
    for words, message in (
        (["-o", str(page)], "is no report of runs, and is kept. --force replaces it."),
        (["-o", str(page), "--filter", "status=damaged"], "No run satisfies"),
    ):
        assert runs.main(["report", str(trained), *words]) == 1
        told = capsys.readouterr().err
        assert message in told
        assert len(told.splitlines()) == 1
    assert page.read_text() == "my notes"
    assert runs.main(["report", str(trained), "-o", str(page), "--force"]) == 0
    assert runs.main(["report", str(trained), "-o", str(page)]) == 0  # gives way to its successor
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
