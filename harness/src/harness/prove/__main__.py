"""Prove what this project promises on your own experiment: a few steps of it, in many ways.

    python scripts/prove.py experiment=mine
    python scripts/prove.py experiment=mine --strategies "ddp(4),dp(2)" trainer.max_steps=12
    python scripts/prove.py experiment=mine --keep runs

The words are what train.py takes. Runs are on the CPU and in 64 bits unless they say
trainer.accelerator and trainer.precision=32-true.
Exit status: 0 all is equal, refused with a sentence, or the run itself has warned why it is not;
1 something differs or fails; 2 a mistake in the command, or one process does not train.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError
from harness.names import program
from harness.prove.runs import Runs, words_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove, print the verdicts, and return the exit status."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(program("harness.prove"), None, __doc__, formatter_class=kind)
    parser.add_argument("words", nargs="*", metavar="key=value", help="as of train.py")
    parser.add_argument("--strategies", metavar="NAMES", help='such as "dp(2),ddp(3),ddp2(2x2)"')
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in a new folder")
    options = parser.parse_intermixed_args(arguments)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _prove(options, Path(folder))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped; nothing is proved.", file=sys.stderr)
        return 130


def _prove(options: argparse.Namespace, folder: Path) -> int:
    if options.keep and options.keep.exists():
        raise UserError(f"--keep {options.keep}: it exists. Name a new folder.")
    names = options.strategies.split(",") if options.strategies else ()
    for name in names:
        words_of(name)
    runs = Runs(options.words, (options.keep or folder).resolve())
    from harness.prove.compare import DIFFERS, FAILS, STRATEGIES, prove  # torch; seconds

    print(f"{' '.join(options.words)}: {runs.num_steps} steps, {runs.precision}\n")
    status = 0
    for verdict in prove(runs, names or STRATEGIES):
        print(verdict, flush=True)
        status |= verdict.verdict in (DIFFERS, FAILS)
    return status


if __name__ == "__main__":
    sys.exit(main())
