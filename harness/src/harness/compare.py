"""Find runs again, and compare them.

    python scripts/runs.py ls                       all runs of outputs/, or: ls FOLDER FOLDER ...
    python scripts/runs.py ls --filter "test/accuracy>0.97" --filter status=finished
    python scripts/runs.py best --by test/accuracy  runs that differ in seed or fold are one row
    python scripts/runs.py diff RUN RUN             in which settings and results two runs differ
    python scripts/runs.py show RUN                 all that is known of one
    python scripts/runs.py report -o report.html    a page with all curves, for any browser
    python scripts/runs.py reproduce RUN            train it again with its commit, and compare

Runs are read in any state: also those that run, were stopped or are damaged. --json is for
programs. Exit status 1: a mistake in the command, there is no run, or it was not reproduced.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError
from harness.files import json_text
from harness.names import program
from harness.runs import reading, table

NUM_RUNS = {"diff": 2, "show": 1, "reproduce": 1}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the arguments ask for, and return the exit status."""
    parser = argparse.ArgumentParser(
        program("harness.compare"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=("ls", "best", "diff", "show", "report", "reproduce"))
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="of runs; default: outputs")
    add("--reverse", action="store_true", help="of best: the other way round")
    add("--filter", action="append", default=[], metavar="NAME=VALUE", help="also <, >, <=, >=, !=")
    add("--by", metavar="METRIC", help="of best; default: the objective of the runs")
    add("-o", "--output", type=Path, help="of report: report.html; of reproduce: a new folder")
    add("--json", action="store_true", help="for a program")
    try:
        return 0 if _answer(parser.parse_intermixed_args(arguments)) else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _answer(options: argparse.Namespace) -> bool:
    """Print, and return whether the run was reproduced where that was asked for."""
    what, runs = options.what, reading.find(options.folders or [Path("outputs")])
    runs = table.chosen(runs, options.filter)
    num = len(runs.frame)
    if num != NUM_RUNS.get(what, num):
        raise UserError(f"{what} takes {NUM_RUNS[what]} run(s), and there are {num}.")
    if what == "reproduce":
        from harness.reproduce import reproduce  # torch

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
        rows, said = table.best(runs, options.by, options.reverse)
        print("" if options.json else f"{said}\n", end="")
    else:
        facts = reading.FACTS if options.json else table.SHOWN
        frame = runs.frame.sort("started")
        rows = table.overview(runs._replace(frame=frame), facts).to_dicts()
    print(json_text(rows)) if options.json else table.show(rows)
    return True


if __name__ == "__main__":
    sys.exit(main())
