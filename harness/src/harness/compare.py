"""Find runs, and compare them.

    python scripts/runs.py ls                       all runs in outputs/; or: ls FOLDER FOLDER ...
    python scripts/runs.py ls --filter "test/accuracy>0.97" --filter status=finished
    python scripts/runs.py best --by test/accuracy  average over runs that differ in seed or fold
    python scripts/runs.py diff RUN RUN             settings and results that differ in two runs
    python scripts/runs.py show RUN                 all settings, results and facts of a run
    python scripts/runs.py report -o report.html    an HTML page with tables and curves
    python scripts/runs.py reproduce RUN            train it again with its commit, and compare

The command reads runs in any state: finished, running, stopped, failed or damaged. --json prints
JSON. Exit status 1: the command has a mistake, finds no run, or does not reproduce the run.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.display import typed_command
from harness.errors import UserError
from harness.files import json_text
from harness.runs import reading, table

NUM_RUNS = {"diff": 2, "show": 1, "reproduce": 1}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    parser = argparse.ArgumentParser(
        typed_command("harness.compare"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=("ls", "best", "diff", "show", "report", "reproduce"))
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="runs, or folders of runs")
    add("--reverse", action="store_true", help="best: print the worst first")
    add("--filter", action="append", default=[], metavar="NAME=VALUE", help="also <, >, <=, >=, !=")
    add("--by", metavar="METRIC", help="best: the metric; default: the objective of the runs")
    add("-o", "--output", type=Path, help="report: the HTML file; reproduce: a new folder")
    add("--json", action="store_true", help="print JSON")
    try:
        return 0 if _run(parser.parse_intermixed_args(arguments)) else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` closes the pipe early
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(options: argparse.Namespace) -> bool:
    """Run a subcommand. Return False only if ``reproduce`` did not reproduce the run."""
    what, runs = options.what, reading.find(options.folders or [Path("outputs")])
    runs = table.filter_runs(runs, options.filter)
    num = len(runs.frame)
    if num != NUM_RUNS.get(what, num):
        examples = ["outputs/<name>/<run>"] * NUM_RUNS[what]
        raise UserError(
            f"{what} needs {'1 run' if len(examples) == 1 else f'{len(examples)} runs'}, but {num} "
            f"{'run matches' if num == 1 else 'runs match'}. Type {what} {' '.join(examples)}"
        )
    if what == "reproduce":
        from harness.reproduce import reproduce  # imported here, because it imports torch

        return reproduce(Path(runs.frame["run"][0]), options.output)
    if what == "report":
        from harness.runs.report import write_report

        path = options.output or Path("report.html")
        write_report(runs, path)
        print(f"{path}: {num} runs, {path.stat().st_size / 1e6:.1f} MB")
        return True
    if what == "diff":
        rows = table.difference(runs)
    elif what == "show":
        rows = table.details(runs)
    elif what == "best":
        rows, order = table.best(runs, options.by, options.reverse)
        print("" if options.json else f"{order}\n", end="")
    else:
        facts = reading.FACTS if options.json else table.LISTED
        frame = runs.frame.sort("started")
        rows = table.overview(runs._replace(frame=frame), facts).to_dicts()
    print(json_text(rows)) if options.json else table.show(rows)
    return True


if __name__ == "__main__":
    sys.exit(main())
