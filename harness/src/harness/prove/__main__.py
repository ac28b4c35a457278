"""Prove what this project promises on your own experiment: a few steps of it, in many ways.

    python scripts/prove.py experiment=mine
    python scripts/prove.py experiment=mine --strategies "ddp(4),dp(2)"
    python scripts/prove.py experiment=mine --json proof.json --keep runs

The words are what train.py takes. Everything runs on the CPU unless they say trainer.accelerator.
Exit status: 0 all holds, or cannot by definition, or is refused with a sentence; 1 a promise is
broken, or a mistake in the command; 2 unknown options.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError
from harness.quick_imports import quick_imports


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove, print a table, and return the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        with quick_imports():
            from harness.prove import report

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return report.prove_and_tell(options, options.keep or Path(folder))
    except UserError as error:
        kept = "" if options.keep else " --keep DIR keeps it."
        print(f"{error}{kept if 'run.log' in str(error) else ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped; nothing is proved.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="as of train.py")
    add("--steps", type=int, default=6, help="optimizer steps of each run")
    add("--strategies", metavar="NAMES", help='such as "dp(2),ddp(3),ddp2(2x2)"')
    add("--precision", default="auto", help="auto takes 64-true where the module can, or 32-true")
    add("--timeout", type=float, default=600.0, help="seconds after which a run counts as hanging")
    add("--keep", type=Path, metavar="DIR", help="keep the runs there")
    add("--json", type=Path, metavar="FILE", help="for a program")
    return parser


if __name__ == "__main__":
    sys.exit(main())
