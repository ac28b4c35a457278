"""``scripts/runs.py report``: what the page holds; test_report_in_chromium.py looks at it."""

import base64
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

from harness import record
from harness.loggers import event_files
from harness.runs import pictures, reading, report
from tests_harness.conftest import ROOT
from tests_harness.scripts.test_runs import copied, trained

__all__ = ["trained"]

OLDER = ROOT / "tests_harness" / "runs" / "before_two_rooms"
pytest.importorskip("plotly")


class Blocks(HTMLParser):
    """The contents of a page's scripts, and all addresses that its tags name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(v) for name, v in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and self.scripts:
            self.scripts[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")


def report_of(*words: object, output: Path) -> dict[str, Any]:
    """The data of a page that the command has written."""
    assert runs.main(["report", *map(str, words), "-o", str(output)]) == 0
    found: dict[str, Any] = json.loads(Blocks(output.read_text()).scripts[0])
    return found


def test_the_page_holds_settings_results_curves_and_pictures(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(trained, folder / "a")
    copied(trained, folder / "b", ("lr: 0.003", "lr: 0.03"))
    data = report_of(folder, output=tmp_path / "page.html")
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["settings"] == [
        {"key": "model.optimizer.lr", "short": "lr", "also": ["model.scheduler.max_lr"]}
    ]
    assert [run["settings"]["model.optimizer.lr"] for run in data["runs"]] == [0.003, 0.03]
    results = json.loads((trained / "results.json").read_text())
    assert data["runs"][0]["metrics"] == results
    assert data["runs"][0]["facts"]["status"] == "finished"
    steps, values = data["runs"][0]["curves"]["val/accuracy"]
    points = reading.read(trained).curves["val/accuracy"]
    assert steps == [step for step, _ in points]
    assert values == pytest.approx([value for _, value in points], rel=1e-5)
    images = data["runs"][0]["pictures"]
    assert images.keys() == {"test/confusion_matrix", "test/worst_mistakes"}
    assert all(base64.b64decode(png).startswith(event_files.PNG) for png in images.values())


def test_the_page_names_no_other_file_and_forbids_every_request(
    trained: Path, tmp_path: Path
) -> None:
    report_of(trained, output=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    found = Blocks(page)
    assert found.addresses == ["data:,"]
    assert "default-src 'none'" in page
    assert len(found.scripts) == 3
    assert "plotly.js" in found.scripts[1][:200]


def test_what_a_run_says_is_never_html(trained: Path, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!-- &amp; \u2028"
    folder = copied(trained, tmp_path / "<b>runs" / "evil")
    with (folder / "config.yaml").open("a") as file:
        file.write(f"\nnotes: {json.dumps(evil)}\n")
    record.note(folder, status="failed", reason=evil)
    (folder / "results.json").unlink()
    data = report_of(folder, output=tmp_path / "page.html")
    assert data["runs"][0]["facts"]["reason"] == evil
    assert data["runs"][0]["facts"]["notes"] == evil
    assert len(Blocks((tmp_path / "page.html").read_text()).scripts) == 3
    assert "alert(1)</script>" not in (tmp_path / "page.html").read_text()
    assert "<title>1 runs of" in (tmp_path / "page.html").read_text()
    assert "<b>" not in re.findall("<title>.*</title>", (tmp_path / "page.html").read_text())[0]


def test_runs_that_are_damaged_or_older_are_in_it(trained: Path, tmp_path: Path) -> None:
    damaged, stopped, strange = (
        copied(trained, tmp_path / "runs" / name) for name in ("damaged", "stopped", "strange")
    )
    (damaged / "config.yaml").write_text("data: [")
    (stopped / "results.json").unlink()
    shutil.rmtree(stopped / "tensorboard")
    (strange / "metrics.csv").write_text("step,val/accuracy\n1,nan\n2,0.5\n3,inf\nx,y")
    (strange / "results.json").write_text('{"test/loss": NaN}')
    for path in strange.glob("tensorboard/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    data = report_of(tmp_path / "runs", OLDER, output=tmp_path / "page.html")
    told = {run["name"].rpartition("/")[2]: run for run in data["runs"]}
    assert told["damaged"]["facts"]["status"] == "damaged"
    assert "cannot be read" in told["damaged"]["facts"]["reason"]
    assert told["stopped"]["pictures"] == {}
    assert told["stopped"]["facts"]["status"] == "stopped"
    assert told["strange"]["curves"] == {"val/accuracy": [[1, 2, 3], [None, 0.5, None]]}
    assert told["strange"]["metrics"] == {"test/loss": "nan"}
    assert told[OLDER.name]["facts"]["status"] == "finished"


def test_long_curves_keep_their_ends_and_extremes() -> None:
    generator = np.random.default_rng(1)
    steps, values = np.arange(0, 100_000, 10), generator.normal(size=10_000)
    values[1234], values[5678], values[9000] = 50, -60, math.nan
    kept_steps, kept = report.thinned(steps, values)
    assert len(kept) <= 1000
    assert (np.diff(kept_steps) > 0).all()
    assert (kept == values[kept_steps // 10]).all()
    assert kept.max() == 50
    assert kept.min() == -60
    for start in range(0, 10_000, 20):  # of every stretch, not of the whole alone
        stretch = values[start : start + 20]
        inside = kept[(kept_steps >= start * 10) & (kept_steps < start * 10 + 200)]
        assert np.nanmin(stretch) == inside.min()
        assert np.nanmax(stretch) == inside.max()


def test_short_curves_are_whole_and_gaps_stay() -> None:
    steps, values = np.arange(900), np.arange(900.0)
    assert (report.thinned(steps, values)[1] == values).all()
    _, kept = report.thinned(np.arange(5000), np.full(5000, math.nan))
    assert len(kept)
    assert np.isnan(kept).all()


def test_another_file_is_kept(trained: Path, tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    page.write_text("my notes")
    assert runs.main(["report", str(trained), "-o", str(page)]) == 1
    assert "is no report of runs, and is kept. --force replaces it." in capsys.readouterr().err
    assert page.read_text() == "my notes"
    assert runs.main(["report", str(trained), "-o", str(page), "--force"]) == 0
    report_of(trained, output=page)  # a report gives way to its successor
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "{folder}"], "is a folder. Give a file: -o"),
        (["-o", "{folder}/page.html/page.html"], "cannot be written"),
        (["-o", "{folder}/other.html", "--filter", "status=damaged"], "No run satisfies"),
    ],
)
def test_mistakes_are_told_in_a_line(
    words: list[str], message: str, trained: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "page.html").write_text("")
    words = [word.format(folder=tmp_path) for word in words]
    assert runs.main(["report", str(trained), *words]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("has_plotly", [True, False])
def test_only_plotly_is_needed(has_plotly: bool, trained: Path, tmp_path: Path) -> None:
    code = "import sys\n" if has_plotly else "import sys; sys.modules['plotly'] = None\n"
    code += "import runs\nstatus = runs.main(['report', *sys.argv[1:]])\n"
    code += "heavy = [n for n in ('torch', 'tensorflow', 'hydra', 'pandas') if n in sys.modules]\n"
    code += "print(heavy, file=sys.stderr); sys.exit(status)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(trained), "-o", str(tmp_path / "page.html")],
        cwd=ROOT / "scripts", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (0 if has_plotly else 1)
    assert done.stderr.endswith("[]\n")
    assert has_plotly != ("pip install -e .[report]" in done.stderr)
    assert has_plotly == (tmp_path / "page.html").exists()


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
