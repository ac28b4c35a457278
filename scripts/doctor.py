"""Look at this machine: its GPUs, cores and packages, what is broken, and what to set.

    python scripts/doctor.py
    python scripts/doctor.py --json
    CUDA_VISIBLE_DEVICES=2,7 python scripts/doctor.py      which GPU is cuda:0 then?

Exit status: 0 all is well; 1 something is broken, with what to do about it; 2 unknown options.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.doctor.examine import examine
from harness.doctor.report import Report
from harness.machine.choice import locked_by, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, show, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="for a program")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="of runs")
    options = parser.parse_args(arguments)
    with Console(stderr=True).status("examining this machine"):  # seen on a terminal only
        report = examine(options.output_dir)
    if options.json:
        print(json.dumps(report.values(), indent=2))
    else:
        show(report)
    return 1 if report.problems else 0


def show(report: Report) -> None:
    """Print one screen."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for section in report.sections:
        for i, line in enumerate(section.text.splitlines()):
            console.print(f"{section.name if i == 0 else '':<15}", style="bold", end="")
            console.print(line, style="red" if section.problems else None)
        if section.name == "GPUs" and report.gpus:
            # What CUDA calls a GPU, and what keeps runs away from it.
            rows = {
                gpu: ", ".join(filter(None, (name or "hidden", gpu.problem or locked_by(gpu))))
                for gpu, name in report.gpus.items()
            }
            console.print("\n".join(table(rows)))
    console.print()
    for problem in report.problems:
        console.print(f"BROKEN         {problem.what}.", style="red")
        console.print(f"               {problem.remedy}")
    if report.problems:
        console.print()
    console.print(f"{'recommended':<15}", style="bold", end="")
    console.print(f"python train.py {' '.join(report.overrides)}")


if __name__ == "__main__":
    sys.exit(main())
