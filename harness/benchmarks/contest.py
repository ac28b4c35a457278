"""What the benchmarks share: contenders take turns, so that a busy machine slows all alike."""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from harness.machine.limits import usable_cores

# Modules beside this one that configs name.
os.environ.setdefault("YAML_ALLOWED", "images,memory,startup")

# The small project of the library's tests, whose commands are measured.
ROOT = Path(__file__).resolve().parents[1] / "tests" / "project"
SOURCES = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(SOURCES)
sys.path.insert(0, SOURCES[0])


def arguments(doc: str, repeats: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
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
    """Median with smallest and largest."""
    median = statistics.median(values)
    return f"{median:.{decimals}f} ({min(values):.{decimals}f} - {max(values):.{decimals}f})"


def ratio(values: list[float], baseline: list[float]) -> str:
    """The same of the ratios within each turn, which a change of the machine's load spares."""
    return spread([value / base for value, base in zip(values, baseline, strict=True)])


def machine() -> str:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((ln.split(": ")[1] for ln in lines if ln.startswith("model name")), model)
    if torch.cuda.is_available():
        model += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    load = os.getloadavg()[0]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{usable_cores()} cores of {model}, {versions}, load {load:.1f}"


def write(path: Path | None, figures: object) -> None:
    """Keep every figure, and what it was measured on."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
