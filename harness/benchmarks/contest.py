"""What the benchmarks share: contenders take turns, so that a busy machine slows all alike."""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.machine import usable_cores

# Modules beside this one that configs name.
os.environ.setdefault("YAML_ALLOWED", "images,startup")

# The small project of the library's tests, whose commands are measured.
ROOT = Path(__file__).resolve().parents[1] / "tests" / "project"
SOURCES = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(SOURCES)
sys.path.insert(0, SOURCES[0])


def arguments(doc: str, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=repeats, help="turns of each contender")
    parser.add_argument("--json", type=Path, help="a file for every single figure")
    return parser


def take_turns(
    contenders: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Measure each contender once per turn."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, measure in contenders.items():
            figures[name].append(measure())
    return figures


def spread(values: list[float], decimals: int = 2) -> str:
    """Return the median with the smallest and the largest."""
    median = statistics.median(values)
    return f"{median:.{decimals}f} ({min(values):.{decimals}f} to {max(values):.{decimals}f})"


def show(title: str, unit: str, figures: Mapping[str, list[float]], decimals: int = 2) -> None:
    """Print a row per contender, with ratios to the first one within each turn."""
    baseline, *_ = figures.values()
    print(f"{machine()}\n\n| {title} | {unit} | of {next(iter(figures))} |\n|---|---|---|")
    for name, values in figures.items():
        ratios = [value / base for value, base in zip(values, baseline, strict=True)]
        print(f"| {name} | {spread(values, decimals)} | {spread(ratios)} |")


def machine() -> str:
    """Return what the figures were measured on."""
    import torch  # late: a process that measures the memory of others must be small itself

    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((ln.split(": ")[1] for ln in lines if ln.startswith("model name")), model)
    if torch.cuda.is_available():
        model += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{usable_cores()} cores of {model}, {versions}, load {os.getloadavg()[0]:.1f}"


def write(path: Path | None, figures: object) -> None:
    """Keep every figure, and what it was measured on."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
