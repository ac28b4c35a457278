"""Compare strategies and a resumed run with one process, in a few steps of your own experiment.

    python scripts/prove.py experiment=mine
    python scripts/prove.py experiment=mine --strategies "ddp(4),dp(2)" trainer.max_steps=12
    python scripts/prove.py experiment=mine --keep runs

Overrides are those of train.py. Runs use the CPU and 64 bits, unless you set trainer.accelerator
and trainer.precision=32-true. Exit status:

    0  each run equals one process, was refused with an error, or has warned why it differs
    1  a run differs without a warning, or fails
    2  the command has a mistake, or one process does not train
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.display import typed_command
from harness.errors import UserError
from harness.prove.short_runs import ExperimentRuns, overrides_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparisons, print each verdict, and return the exit status."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        typed_command("harness.prove"), None, __doc__, formatter_class=kind
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in train.py")
    parser.add_argument("--strategies", metavar="NAMES", help='such as "dp(2),ddp(3),ddp2(2x2)"')
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in this new folder")
    options = parser.parse_intermixed_args(arguments)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _prove(options, Path(folder))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C before all comparisons were made.", file=sys.stderr)
        return 130


def _prove(options: argparse.Namespace, folder: Path) -> int:
    if options.keep and options.keep.exists():
        raise UserError(f"--keep {options.keep}: the folder exists already. Name a new folder.")
    names = options.strategies.split(",") if options.strategies else ()
    for name in names:
        overrides_of(name)
    runs = ExperimentRuns(options.overrides, (options.keep or folder).resolve())
    from harness.prove.compare import DIFFERS, FAILS, STRATEGIES, prove  # imports torch: seconds

    print(f"{' '.join(options.overrides)}: {runs.num_steps} steps, {runs.precision}\n")
    status = 0
    for comparison in prove(runs, names or STRATEGIES):
        print(comparison, flush=True)
        status |= comparison.verdict in (DIFFERS, FAILS)
    return status


if __name__ == "__main__":
    sys.exit(main())
