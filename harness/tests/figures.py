"""Run cases one after another, and print what came of each as a row of a table."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

Rows: TypeAlias = dict[str, tuple[bool, str]]  # whether the bar is met, and the figures


def show(
    title: str, names: Iterable[str], run: Callable[[str, Path], Rows], json_path: Path | None
) -> None:
    """Print the rows of some cases.

    Args:
        title: of the table's first column.
        names: of the cases.
        run: gives the rows of a case; it gets the name and an empty folder.
        json_path: where all rows are written as well.

    Raises:
        SystemExit: a bar was missed.
    """
    rows: Rows = {}
    print(f"| {title} | outcome |\n|---|---|", flush=True)
    for name in names:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = run(name, Path(folder))
        for case, (is_met, figures) in found.items():
            print(f"| {case} | {'' if is_met else 'MISSED: '}{figures} |", flush=True)
        print(f"<!-- {name}: {time.monotonic() - started:.0f} s -->", flush=True)
        rows |= found
    if json_path:
        json_path.write_text(json.dumps(rows, indent=2) + "\n")
    if not all(is_met for is_met, _ in rows.values()):
        sys.exit("A bar was missed.")
