"""Find settings of an experiment by trying them; nothing of the trials is kept.

    python scripts/tune.py workers experiment=synthetic       data.num_workers
    python scripts/tune.py batch-size experiment=synthetic    data.batch_size that fits in memory
    python scripts/tune.py lr experiment=synthetic            model.optimizer.lr

What follows the first word is what train.py takes. The last line on the screen is for pasting
behind train.py; the curve of lr goes to <output_dir>/tune/. Exit status: 0 found; 1 a mistake in
the command, or nothing found; 2 unknown options; 130 Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence

from harness.errors import UserError
from harness.names import program

WHAT = ("workers", "batch-size", "lr")


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune what the arguments name and return the exit status."""
    parser = argparse.ArgumentParser(
        program("harness.tune"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of train.py")
    options = parser.parse_args(arguments)
    try:
        from harness.tune import trials  # torch and Lightning; seconds

        tune = (trials.tune_workers, trials.tune_batch_size, trials.tune_learning_rate)
        line = tune[WHAT.index(options.what)](trials.composed(options.overrides))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
