"""Join the runs of a k-fold: the table of their tests, and one prediction for each sample.

    python train.py -m experiment=table data.fold=0,1,2,3,4       does it at its end
    python scripts/folds.py outputs/sweeps/<date>_<time>          again, after a fold was resumed
    python scripts/folds.py <folder of fold 0> <folder of fold 1> ...

The predictions go to out_of_fold.csv in the sweep's folder. Exit status: 0 done; 1 a fold is
missing, unfinished or of other settings; 2 unknown options.
"""

import argparse
import sys
from collections.abc import Sequence

from harness.command import folds
from harness.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Join what the arguments name and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", help="of a sweep, or of each fold's run")
    try:
        print(folds.join(parser.parse_args(arguments).folders))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
