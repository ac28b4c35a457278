"""Find runs again, and compare them.

    python scripts/runs.py ls                       all runs of outputs/, or: ls FOLDER FOLDER ...
    python scripts/runs.py ls --filter "test/accuracy>0.97" --filter status=finished --sort seconds
    python scripts/runs.py best --by test/accuracy  runs that differ in seed or fold are one row
    python scripts/runs.py diff RUN RUN             in which settings and results two runs differ
    python scripts/runs.py show RUN                 all that is known of one
    python scripts/runs.py report -o report.html    a page with all curves, for any browser
    python scripts/runs.py reproduce RUN            train it again with its commit, and compare

Runs are read in any state: also those that run, were stopped or are damaged. --json is for
programs. Exit status 1: a mistake in the command, there is no run, or it was not reproduced.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.names import program

if TYPE_CHECKING:
    from harness.runs.frame import Table

NUM_RUNS = {"diff": 2, "show": 1, "reproduce": 1}
# A metric whose name has one of these is better when it is smaller.
LOSSES = ("loss", "error", "mae", "mse", "perplexity")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the arguments ask for, and return the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        return 0 if _answer(options) else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


def _answer(options: argparse.Namespace) -> bool:
    """Print, and return whether the run was reproduced where that was asked for."""
    from harness.runs import frame, reading, tables

    what, runs = options.what, reading.find(options.folders or [Path("outputs")])
    if not runs:
        raise UserError("There is no run. Give folders of runs, such as outputs/.")
    if len(runs) != NUM_RUNS.get(what, len(runs)):
        raise UserError(f"{what} takes {NUM_RUNS[what]} run(s), and there are {len(runs)}.")
    if what == "reproduce":
        from harness.reproduce import reproduce  # torch

        return reproduce(runs[0], options.output)
    if what == "diff":
        tables.print_difference(runs[0], runs[1], options.json)
        return True
    if what == "show":
        tables.print_one(runs[0], options.json)
        return True
    table = frame.chosen(frame.table_of(runs), options.filter)
    if table.frame.is_empty():
        raise UserError(f"No run satisfies the filters: 0 of {len(runs)}.")
    if what == "ls":
        name = frame.column_named(table, options.sort)
        rows = table.frame.sort(name, descending=options.reverse, nulls_last=True)
        tables.print_list(replace(table, frame=rows), options.json)
    elif what == "best":
        _print_best(table, options)
    else:
        from harness.runs.report import write_report

        path, names = options.output or Path("report.html"), {*table.frame["run"]}
        write_report([run for run in runs if str(run.folder) in names], path)
        print(f"{path}: {len(names)} runs, {path.stat().st_size / 1e6:.1f} MB")
    return True


def _print_best(table: "Table", options: argparse.Namespace) -> None:
    """Print groups of runs by one metric, the best first."""
    from harness.runs import frame, tables

    modes = dict(table.frame.select("objective", "mode").drop_nulls().unique().iter_rows())
    if not options.by and len(modes) != 1:
        raise UserError(f"The runs have {len(modes)} objectives. Add --by METRIC.")
    name = frame.column_named(table, options.by or next(iter(modes)))
    is_loss = modes[name] == "min" if name in modes else any(word in name for word in LOSSES)
    is_max = is_loss == options.reverse
    means = frame.groups(table, name, is_max)
    if means.is_empty():
        raise UserError(f"None of {len(table.frame)} runs has a value of {name}.")
    if not options.json:
        print(f"the {'largest' if is_max else 'smallest'} {name} first; --reverse turns it")
    tables.show(means, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        program("harness.runs"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=("ls", "best", "diff", "show", "report", "reproduce"))
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="of runs; default: outputs")
    add("--sort", default="started", metavar="NAME", help="of ls: a fact, a metric or a setting")
    add("--reverse", action="store_true", help="the other way round")
    add("--filter", action="append", default=[], metavar="NAME=VALUE", help="also <, >, <=, >=, !=")
    add("--by", metavar="METRIC", help="of best; default: the objective of the runs")
    add("-o", "--output", type=Path, help="of report: report.html; of reproduce: a new folder")
    add("--json", action="store_true", help="for a program")
    return parser


if __name__ == "__main__":
    sys.exit(main())
