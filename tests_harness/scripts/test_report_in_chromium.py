"""The report of runs in a real browser: it sorts, filters, hides, compares and asks for nothing."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs

from harness import record
from tests_harness.scripts.browser import BROWSER, DRIVER, Page, browser
from tests_harness.scripts.test_runs import copied, trained

__all__ = ["trained"]

pytest.importorskip("plotly")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs Debian's chromium and chromium-driver"
)
EVIL = "</script><img src=x onerror=alert(1)>"
DRAWN = "return document.querySelector('#curves .main-svg') !== null"
# What comes into sight is drawn.
TO = "document.getElementById(arguments[0]).scrollIntoView({block: 'center'})"
NUM_CURVES = "return document.getElementById('curves').data.length"


@pytest.fixture(scope="module")
def page_file(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of four runs, of which two differ in two settings and one has failed."""
    folder = tmp_path_factory.mktemp("sweep")
    shutil.copytree(trained, folder / "runs" / "a")
    for name, lr, dropout, value in (("b", "0.03", "0.0", 0.9), ("c", "0.3", "0.5", 0.2)):
        made = copied(
            trained, folder / "runs" / name,
            ("lr: 0.003", f"lr: {lr}"), ("dropout: 0.0", f"dropout: {dropout}"),
        )  # fmt: skip
        (made / "results.json").write_text(json.dumps({"test/accuracy": value}))
    failed = copied(trained, folder / "runs" / "d", ("seed: 1\n", "seed: 2\n"))
    (failed / "results.json").unlink()
    record.note(failed, status="failed", reason=EVIL)
    assert runs.main(["report", str(folder / "runs"), "-o", str(folder / "page.html")]) == 0
    return folder / "page.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def page(chromium: Page, page_file: Path) -> Iterator[Page]:
    """The page as it is when it has been opened; afterwards nobody has complained."""
    chromium.resize(1200, 900)
    chromium.open(page_file)
    chromium.wait(DRAWN)
    chromium.errors()
    yield chromium
    assert chromium.errors() == []
    assert chromium.run("return performance.getEntriesByType('resource').map(e => e.name)") == []
    chromium.run("localStorage.clear()")


def column(page: Page, key: str) -> list[str]:
    """What the table shows in a column, from above to below."""
    found: list[str] = page.run(
        """const heads = [...document.querySelectorAll('#runs thead th')];
        const place = heads.findIndex((head) => head.dataset.key === arguments[0]);
        const rows = [...document.querySelectorAll('#runs tbody tr')];
        return rows.map((row) => row.cells[place].textContent);""",
        key,
    )
    return found


def settled(page: Page, script: str, *arguments: Any) -> None:
    page.wait(f"return ({script})", *arguments)


def test_opening_it_tells_nothing_to_the_console(chromium: Page, page_file: Path) -> None:
    chromium.errors()
    chromium.open(page_file)
    chromium.wait(DRAWN)
    chromium.run(TO, "pictures")
    chromium.wait("return document.querySelectorAll('#gallery img').length === 4")
    assert chromium.errors() == []
    assert chromium.run("return performance.getEntriesByType('resource').length") == 0
    assert chromium.run("return [...document.images].every((image) => image.naturalWidth > 100)")


def test_a_column_sorts_up_and_down(page: Page) -> None:
    def accuracies() -> list[float]:
        return [float(text) for text in column(page, "test/accuracy") if text]

    page.click("th[data-key='test/accuracy'] button")
    settled(page, "document.querySelector('th[aria-sort=ascending]') !== null")
    assert accuracies() == sorted(accuracies())
    page.click("th[data-key='test/accuracy'] button")
    settled(page, "document.querySelector('th[aria-sort=descending]') !== null")
    assert accuracies() == sorted(accuracies(), reverse=True)
    assert column(page, "run")[0] == "b"


def test_a_box_hides_a_curve_and_shows_it_again(page: Page) -> None:
    assert page.run(NUM_CURVES) == 4
    page.click("#runs tbody input[title='show a']")
    page.run(TO, "curves")
    settled(page, "document.getElementById('curves').data.length === 3")
    names = page.run("return document.getElementById('curves').data.map((trace) => trace.name)")
    assert "a" not in names
    page.run(TO, "pictures")
    settled(page, "document.querySelectorAll('#gallery img').length === 3")
    page.click("#runs tbody input[title='show a']")
    page.run(TO, "curves")
    settled(page, "document.getElementById('curves').data.length === 4")
    page.click("#runs thead input")
    page.run(TO, "curves")
    settled(page, "document.getElementById('curves').data.length === 0")


def test_a_click_on_the_legend_is_one_on_the_box(page: Page) -> None:
    page.click("#curves .legend .traces .legendtoggle")
    settled(page, "document.getElementById('curves').data.length === 3")
    assert page.run("return document.querySelectorAll('#runs tbody input:checked').length") == 3


def test_the_filter_takes_words_and_conditions(page: Page) -> None:
    for words, left in (
        ("lr>=0.03", {"b", "c"}),
        ("status=failed", {"d"}),
        ("FINISHED lr<0.1", {"a", "b"}),
    ):
        page.run(
            "const box = document.getElementById('filter'); box.value = arguments[0];"
            "box.dispatchEvent(new Event('input'));",
            words,
        )
        page.run(TO, "curves")
        settled(page, f"document.getElementById('curves').data.length === {len(left)}")
        assert set(column(page, "run")) == left


def test_two_chosen_runs_show_in_what_they_differ(page: Page) -> None:
    page.run(
        """for (const [id, name] of [['one', 'a'], ['two', 'c']]) {
          const select = document.getElementById(id);
          select.value = [...select.options].find((option) => option.text === name).value;
          select.dispatchEvent(new Event('change'));
        }"""
    )
    rows = page.run(
        "return [...document.querySelectorAll('#difference tr.setting')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert sorted(rows) == [
        ["model.net.dropout", "0", "0.5"],
        ["model.optimizer.lr", "0.003", "0.3"],
    ]
    assert page.run("return document.querySelectorAll('#pair img').length") == 4


def test_metrics_stand_against_settings(page: Page) -> None:
    page.run(TO, "scatter")
    settled(page, "document.getElementById('parallel').data !== undefined")
    assert page.run("return document.getElementById('scatter').layout.xaxis.type") == "log"
    assert page.run("return document.getElementById('scatter').data[0].x.length") == 4
    labels = "document.getElementById('parallel').data[0].dimensions.map((one) => one.label)"
    assert page.run(f"return {labels}") == ["lr", "dropout", "seed", "best val/accuracy"]


def test_log_axis_smoothing_and_metric_redraw_the_curves(page: Page) -> None:
    before = page.run("return document.getElementById('curves').data[0].y")
    page.click("#log-value")
    settled(page, "document.getElementById('curves').layout.yaxis.type === 'log'")
    page.run(
        "const range = document.getElementById('smooth'); range.value = 0.5;"
        "range.dispatchEvent(new Event('input'));"
    )
    after = page.run("return document.getElementById('curves').data[0].y")
    assert after[0] == pytest.approx(before[0])
    assert after[1] == pytest.approx((0.25 * before[0] + 0.5 * before[1]) / 0.75)


def test_many_long_curves_are_thinned_and_a_part_of_them_is_whole(page: Page) -> None:
    """200 curves of 1,000 points each: few are drawn, and all of those that are zoomed in on."""
    page.run(
        """const steps = Array.from({ length: 1000 }, (_, i) => i);
        const values = steps.map((step) => (step === 501 ? 9 : step % 7));
        for (let i = 0; i < 196; i++) RUNS.push({ ...RUNS[0], name: `more${i}` });
        for (const run of RUNS) run.curves = { [byId('metric').value]: [steps, values] };
        refresh();"""
    )
    settled(page, "document.getElementById('curves').data.length === 200")
    steps, values = page.run(
        "const { x, y } = document.getElementById('curves').data[0]; return [x, y]"
    )
    assert len(steps) <= 200
    assert values[steps.index(501)] == 9
    page.run("Plotly.relayout('curves', { 'xaxis.range': [400, 450] })")
    settled(page, "document.getElementById('curves').data[0].x.length === 53")
    page.run("Plotly.relayout('curves', { 'xaxis.autorange': true })")
    settled(page, "document.getElementById('curves').data[0].x.length > 100")


def test_what_a_run_says_is_text(page: Page) -> None:
    assert EVIL in page.run("return document.getElementById('troubles').textContent")
    assert not page.run("return [...document.images].some((image) => image.src.endsWith('x'))")


def test_light_dark_and_a_phone(page: Page, page_file: Path) -> None:
    def colours() -> list[str]:
        found: list[str] = page.run(
            "return [getComputedStyle(document.body).backgroundColor, "
            "document.getElementById('curves').layout.font.color]"
        )
        return found

    light = colours()
    page.resize(390, 844, is_dark=True)
    page.open(page_file)
    page.wait(DRAWN)
    dark = colours()
    assert light[0] == "rgb(245, 246, 248)"
    assert dark[0] == "rgb(20, 22, 26)"
    assert dark[1] != light[1]
    assert page.run("return document.documentElement.scrollWidth") == 390  # nothing sticks out
    page.click("#theme")
    page.run(TO, "curves")
    settled(page, "document.getElementById('curves').layout.font.color === arguments[0]", light[1])
    assert colours() == light
