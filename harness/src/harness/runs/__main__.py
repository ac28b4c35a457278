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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.names import program

if TYPE_CHECKING:
    from harness.runs.reading import RunFiles


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the arguments ask for, and return the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        return 0 if _answer(options) else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C.", file=sys.stderr)
        return 1
    except BrokenPipeError:  # of a pager that was left
        sys.stderr.close()
        return 0


def _answer(options: argparse.Namespace) -> bool:
    """Print, and return whether all is as it should be."""
    from harness.runs import comparing, reading, tables

    if options.output and options.what not in ("report", "reproduce"):
        raise UserError(f"-o is of report and reproduce: write {options.what}'s rows with > FILE.")
    runs = reading.find(options.folders or [Path("outputs")])
    if not runs:
        raise UserError("There is no run. Give folders of runs, such as outputs/.")
    form = options.form or "table"
    if wanted := {"diff": 2, "show": 1, "reproduce": 1}.get(options.what):
        if len(runs) != wanted:
            raise UserError(f"{options.what} takes {wanted} run(s), and there are {len(runs)}.")
        if options.what == "reproduce":
            from harness.reproduce import reproduce  # torch

            again = runs[0].folder / "reproduced" / time.strftime("%Y-%m-%d_%H-%M-%S")
            return reproduce(runs[0], options.output or again)
        if options.what == "diff":
            tables.print_difference(runs[0], runs[1], form)
        else:
            tables.print_one(runs[0], form)
        return True
    found = comparing.chosen(runs, options.filter)
    if options.filter and (found or options.what != "report"):
        print(f"{len(found)} of {len(runs)} runs match.", file=sys.stderr)
    runs = found
    if options.what == "report":
        _report(runs, options.output or Path("report.html"), options.force)
    elif options.what == "best":
        objectives = {run.objective for run in runs if run.objective}
        key = options.by or ("best" if len(objectives) == 1 else "")
        if objectives == {key}:  # as ls and the report name it
            key = "best"
        if not key:
            raise UserError(f"They have several objectives ({', '.join(objectives)}): add --by.")
        of_loss = any(word in key for word in ("loss", "error", "mae", "mse", "perplexity"))
        is_max = _is_max(runs) if key == "best" else not of_loss
        is_max = is_max != options.reverse
        if key != "best" and form == "table":
            print(f"the {'largest' if is_max else 'smallest'} {key} first; --reverse turns it")
        tables.print_best(runs, key, is_max, form)
    else:
        comparing.check_name(runs, options.sort)
        tables.print_list(comparing.in_order(runs, options.sort, options.reverse), form)
    return True


def _is_max(runs: "Sequence[RunFiles]") -> bool:
    """Whether more of their objective is better, in all of them."""
    return {run.config.get("mode") for run in runs if run.config} == {"max"}


def _report(runs: "Sequence[RunFiles]", path: Path, is_forced: bool) -> None:
    from harness.runs.report import write_report

    if not runs:
        raise UserError("No run satisfies the filters: there is nothing to report.")
    try:
        write_report(runs, path, is_forced, _is_max(runs))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    print(f"{path}: {len(runs)} runs, {path.stat().st_size / 1e6:.1f} MB")


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
    add("--by", metavar="METRIC", help="of best; default: the best value of the runs' objective")
    add("-o", "--output", type=Path, help="of report: report.html; of reproduce: a new folder")
    add("--force", action="store_true", help="of report: replace a file that is no report")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="form", action="store_const", const="json")
    form.add_argument("--csv", dest="form", action="store_const", const="csv")
    return parser


if __name__ == "__main__":
    sys.exit(main())
