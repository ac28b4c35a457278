"""Stop runs of real modules in every way, and see whether anything is lost.

python -m tests.faults --num 100              kills of all modules, about half an hour
python -m tests.faults --num 10 --only GAN    of one kind of them
"""

import argparse
import os
import random
from pathlib import Path

import torch

from tests import figures
from tests.conftest import ROOT
from tests.faults.real_modules import CONFIGURATIONS
from tests.faults.storm import storm


def main() -> None:
    os.chdir(ROOT)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=50, help="how many kills")
    parser.add_argument("--seed", type=int, default=0, help="another one strikes at other moments")
    parser.add_argument("--only", default="", help="modules whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a fork has no other threads, and would wait for them
    names = [name for name in CONFIGURATIONS if options.only in name]

    def strike(name: str, folder: Path) -> figures.Rows:
        i = names.index(name)
        # As evenly as the number of kills can be shared, and never none.
        num = max(1, options.num * (i + 1) // len(names) - options.num * i // len(names))
        outcome = storm(name, folder, random.Random(f"{options.seed} {name}"), num)
        wrong = [*outcome.differences, *outcome.failures]
        return {name: (not wrong and not outcome.num_hangs, "; ".join([str(outcome), *wrong]))}

    figures.show("kill -9, SIGTERM of all, a rank, a worker", names, strike, options.json)


if __name__ == "__main__":
    main()
