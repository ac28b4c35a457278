"""Find runs again, and compare them.

    python scripts/runs.py ls                       all runs of outputs/, or: ls FOLDER FOLDER ...
    python scripts/runs.py ls --filter "test/accuracy>0.97" --filter status=finished --sort seconds
    python scripts/runs.py best --by test/accuracy  runs that differ in seed or fold are one row
    python scripts/runs.py diff RUN RUN             in which settings and results two runs differ
    python scripts/runs.py show RUN                 all that is known of one
    python scripts/runs.py report -o report.html    a page with all curves, for any browser
    python scripts/runs.py reproduce RUN            train it again with its commit, and compare

Runs are read in any state: also those that run, were stopped or are damaged. --json and --csv are
for programs. Exit status 1: a mistake in the command, there is no run, or it was not reproduced.
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
    except BrokenPipeError:  # a pager was left
        sys.stderr.close()
        return 0


def _answer(options: argparse.Namespace) -> bool:
    """Print, and return whether the run was reproduced where that was asked for."""
    from harness.runs import frame, reading, tables

    what, form = options.what, options.form or "table"
    runs = reading.find(options.folders or [Path("outputs")])
    if not runs:
        raise UserError("There is no run. Give folders of runs, such as outputs/.")
    if len(runs) != NUM_RUNS.get(what, len(runs)):
        raise UserError(f"{what} takes {NUM_RUNS[what]} run(s), and there are {len(runs)}.")
    if what == "reproduce":
        from harness.reproduce import reproduce  # torch

        return reproduce(runs[0], options.output)
    if what == "diff":
        tables.print_difference(runs[0], runs[1], form)
        return True
    if what == "show":
        tables.print_one(runs[0], form)
        return True
    table = frame.chosen(frame.table_of(runs), options.filter)
    if table.frame.is_empty():
        raise UserError(f"No run satisfies the filters: 0 of {len(runs)}.")
    if options.filter:
        print(f"{len(table.frame)} of {len(runs)} runs match.", file=sys.stderr)
    if what == "best":
        _print_best(table, options, form)
    elif what == "ls":
        tables.print_list(frame.in_order(table, options.sort, options.reverse), form)
    else:
        from harness.runs.report import write_report

        path, names = options.output or Path("report.html"), {*table.frame["run"]}
        runs = [run for run in runs if str(run.folder) in names]
        write_report(runs, path, options.force)
        print(f"{path}: {len(runs)} runs, {path.stat().st_size / 1e6:.1f} MB")
    return True


def _print_best(table: "Table", options: argparse.Namespace, form: str) -> None:
    """Print groups of runs, the best first: by one metric, or for each objective by itself."""
    import polars as pl

    from harness.runs import frame, tables

    pairs = table.frame.select("objective", "mode").drop_nulls("objective").unique()
    modes = dict(pairs.sort("objective").iter_rows())
    names, means = [frame.column_named(table, options.by)] if options.by else [*modes], []
    for name in names:
        is_loss = modes[name] == "min" if name in modes else any(w in name for w in LOSSES)
        is_max = is_loss == options.reverse
        rows = table.frame if options.by else table.frame.filter(pl.col("objective") == name)
        means.append(frame.groups(replace(table, frame=rows), name, is_max))
        if form == "table" and len(means[-1]):
            print(f"the {'largest' if is_max else 'smallest'} {name} first; --reverse turns it")
            tables.print_best(means[-1])
    if all(map(pl.DataFrame.is_empty, means)):
        wanted = " or ".join(names) or "an objective: add --by"
        raise UserError(f"None of {len(table.frame)} runs has a value of {wanted}.")
    if form != "table":
        tables.write(pl.concat(means, how="diagonal_relaxed").to_dicts(), form)


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
    add("--by", metavar="METRIC", help="of best; default: the best value of each run's objective")
    add("-o", "--output", type=Path, help="of report: report.html; of reproduce: a new folder")
    add("--force", action="store_true", help="of report: replace a file that is no report")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="form", action="store_const", const="json")
    form.add_argument("--csv", dest="form", action="store_const", const="csv")
    return parser


if __name__ == "__main__":
    sys.exit(main())
