"""``scripts/runs.py report``: what the page holds, and that a browser shows it."""

import json
import math
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import runs

from harness import record
from harness.runs import pictures, reading, report
from tests_harness.conftest import ROOT
from tests_harness.scripts.test_runs import copied

pytest.importorskip("plotly")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
EVIL = "</script><img src=x onerror=alert(1)><!-- &amp; \u2028"


class Blocks(HTMLParser):
    """A page's tags, all addresses that they name, and the cells of its table."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(v) for name, v in attrs if name in ("src", "href")]
        self.cells += [""] if tag in ("td", "th") else []

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] in (["td"], ["th"]):
            self.cells[-1] += data

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
    shutil.rmtree(failed / "tensorboard")
    (failed / "metrics.csv").write_text("step,val/accuracy\n1,nan\n2,0.5\n3,inf\nx,y")
    damaged = copied(trained, folder / "damaged")
    (damaged / "config.yaml").write_text("data: [")
    for path in damaged.glob("tensorboard/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert runs.main(["report", str(folder), "-o", str(folder / "page.html")]) == 0
    return folder


def test_the_page_holds_results_settings_and_pictures(folder: Path) -> None:
    page = Blocks((folder / "page.html").read_text())
    num_columns = page.tags.count("th")
    head, *rows = (page.cells[i::1][:num_columns] for i in range(0, len(page.cells), num_columns))
    table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert table.keys() == {"a", "<b>b", "c", "failed", "damaged"}
    assert table["<b>b"]["lr"] == "0.03"
    assert table["c"]["dropout"] == "0.5"
    accuracy = json.loads((folder / "a" / "results.json").read_text())["test/accuracy"]
    assert table["a"]["test/accuracy"] == f"{accuracy:.4g}"
    assert table["failed"]["reason"] == EVIL
    assert table["damaged"]["status"] == "damaged"
    assert "cannot be read" in table["damaged"]["reason"]
    assert page.tags.count("img") >= 3 * len(pictures.pictures(folder / "a")) > 0


def test_the_page_names_no_other_file_and_what_a_run_says_is_never_html(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    page = Blocks(text)
    assert all(address.startswith("data:") for address in page.addresses)
    assert "default-src 'none'" in text
    assert "<b>" not in text
    assert "<img src=x" not in text


@pytest.mark.skipif(not BROWSER, reason="needs Debian's chromium")
def test_a_browser_draws_the_figures_and_complains_of_nothing(folder: Path, tmp_path: Path) -> None:
    flags = "--headless --no-sandbox --disable-gpu --enable-unsafe-swiftshader --dump-dom"
    flags += f" --enable-logging=stderr --virtual-time-budget=20000 --user-data-dir={tmp_path}"
    done = subprocess.run(
        [str(BROWSER), *flags.split(), (folder / "page.html").as_uri()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.count('class="plot-container plotly"') == 3
    assert "parcoords" in done.stdout
    told = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert [line for line in told if "GL Driver Message" not in line] == []


def test_figures_hold_what_was_logged(folder: Path) -> None:
    names = ("a", "c", "failed", "<b>b")
    found = [reading.read(folder / name) for name in names]
    figure = report.curves_of(found[:3], names[:3])
    metrics = figure["layout"]["updatemenus"][0]["buttons"]
    assert metrics[0]["label"] == found[0].objective == "val/accuracy"
    shown = metrics[0]["args"][0]["visible"]
    traces = [trace for trace, is_shown in zip(figure["data"], shown, strict=True) if is_shown]
    assert traces == [trace for trace in figure["data"] if trace["visible"]]
    assert [trace["name"] for trace in traces] == ["a", "c", "failed"]
    points = found[0].curves["val/accuracy"]
    assert [*traces[0]["x"]] == [step for step, _ in points]
    assert [*traces[0]["y"]] == pytest.approx([value for _, value in points])
    scatter = report.scatter_of(found[:2], ["a", "c"])
    assert scatter["layout"]["xaxis"] == {
        "title": {"text": "model.optimizer.lr"},
        "type": "log",
    }
    assert scatter["data"][0]["x"] == [0.003, 0.3]
    (lines,) = report.parallel_of(found, is_max=True)["data"]
    assert [axis["label"] for axis in lines["dimensions"]][:2] == ["lr", "dropout"]


def test_long_curves_keep_their_ends_and_extremes() -> None:
    generator = np.random.default_rng(1)
    steps, values = np.arange(0, 100_000, 10), generator.normal(size=10_000)
    values[1234], values[5678], values[9000] = 50, -60, math.nan
    kept_steps, kept = report.thinned(steps, values)
    assert len(kept) <= 500
    assert (np.diff(kept_steps) > 0).all()
    assert (kept == values[kept_steps // 10]).all()
    for start in range(0, 10_000, 40):  # of every stretch, not of the whole alone
        stretch = values[start : start + 40]
        inside = kept[(kept_steps >= start * 10) & (kept_steps < start * 10 + 400)]
        assert np.nanmin(stretch) == inside.min()
        assert np.nanmax(stretch) == inside.max()
    assert np.isnan(report.thinned(np.arange(5000), np.full(5000, math.nan))[1]).all()


def test_another_file_is_kept_and_mistakes_are_told_in_a_line(
    trained: Path, tmp_path: Path, capsys
) -> None:
    page = tmp_path / "page.html"
    page.write_text("my notes")
    for words, message in (
        (["-o", str(page)], "is no report of runs, and is kept. --force replaces it."),
        (["-o", str(tmp_path)], "is a folder. Give a file: -o"),
        (["-o", str(page / "page.html")], "cannot be written"),
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


def test_only_plotly_is_needed(trained: Path, tmp_path: Path) -> None:
    code = "import sys\nif sys.argv[3] == 'none': sys.modules['plotly'] = None\n"
    code += "import runs\nstatus = runs.main(['report', *sys.argv[1:3], '-o', sys.argv[4]])\n"
    code += "heavy = [n for n in ('torch', 'tensorflow', 'hydra', 'pandas') if n in sys.modules]\n"
    code += "print(heavy, file=sys.stderr); sys.exit(status)"
    for has in ("none", "plotly"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(trained), "--reverse", has, str(tmp_path / has)],
            cwd=ROOT / "scripts", capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (has == "none"), done.stderr
        assert done.stderr.endswith("[]\n")
        assert ("pip install -e .[report]" in done.stderr) == (has == "none")


def test_the_newest_picture_of_a_name_counts(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for step in (1, 2):
            writer.add_image("sample", np.full((3, 64, 64), step / 4, dtype=np.float32), step)
            writer.add_scalar("loss", 0.5, step)
    from PIL import Image

    (data,) = pictures.pictures(tmp_path).values()
    (tmp_path / "sample.png").write_bytes(data)
    assert Image.open(tmp_path / "sample.png").getpixel((0, 0)) == (127, 127, 127)
