"""Functions of all benchmarks: contenders take turns, so that a busy machine slows all equally."""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.devices import usable_cores

FIGURES = "BENCH_FIGURES"  # the file to which every table adds a line of JSON, if it is set
# Modules beside this one that configs name.
os.environ.setdefault("YAML_ALLOWED", "gpu,images,scale,startup")

# The small project of the library's tests, whose commands are measured.
ROOT = Path(__file__).resolve().parents[1] / "tests" / "project"
SOURCES = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(SOURCES)
sys.path.insert(0, SOURCES[0])


def arguments(doc: str, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the option that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=repeats, help="turns of each contender")
    return parser


def take_turns(
    contenders: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Measure each contender once per turn, and print each figure at once."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats):
        for name, measure in contenders.items():
            figures[name].append(measure())
            print(f"turn {turn + 1} of {repeats}: {name} {figures[name][-1]:.4g}", flush=True)
    return figures


def spread(values: list[float], decimals: int = 2) -> str:
    """Return the median with the smallest and the largest."""
    median = statistics.median(values)
    return f"{median:.{decimals}f} ({min(values):.{decimals}f} to {max(values):.{decimals}f})"


def record(title: str, unit: str, figures: Mapping[str, list[float]]) -> None:
    """Add figures to the file of ``bench.py``, if it runs this benchmark."""
    if FIGURES in os.environ:
        with open(os.environ[FIGURES], "a") as file:
            file.write(json.dumps({"title": title, "unit": unit, "figures": figures}) + "\n")


def show(title: str, unit: str, figures: Mapping[str, list[float]], decimals: int = 2) -> None:
    """Print a row per contender, with ratios to the first one within each turn."""
    record(title, unit, figures)
    baseline, *_ = figures.values()
    versions = f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    print(f"{usable_cores()} cores of {platform.machine()}, {versions}\n")
    print(f"| {title} | {unit} | of {next(iter(figures))} |\n|---|---|---|")
    for name, values in figures.items():
        ratios = [value / base for value, base in zip(values, baseline, strict=True)]
        print(f"| {name} | {spread(values, decimals)} | {spread(ratios)} |")
