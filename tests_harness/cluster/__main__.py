"""Two hosts and a real Slurm for as long as it takes: the figures of docs/cluster.md.

python -m tests_harness.cluster                 all cases, as root; about half an hour on two cores
python -m tests_harness.cluster hosts slurm     some of them
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tests_harness import figures
from tests_harness.cluster import hosts, slurm
from tests_harness.cluster.long_hosts import host, link, skew
from tests_harness.cluster.long_hosts import hosts as both_hosts
from tests_harness.cluster.long_slurm import slurm as of_slurm
from tests_harness.figures import Rows

CASES: dict[str, Callable[[Path], Rows]] = {
    "hosts": both_hosts,
    "host": host,
    "link": link,
    "skew": skew,
    "slurm": of_slurm,
}
NEED_SLURM = ("slurm",)


def main() -> None:
    """Run the cases, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - CASES.keys():
        parser.error(f"unknown: {', '.join(unknown)}. Choose from {', '.join(CASES)}.")
    figures.show("case", arguments.cases or CASES, case, arguments.json)


def case(name: str, folder: Path) -> Rows:
    if reason := slurm.missing() if name in NEED_SLURM else hosts.missing():
        sys.exit(f"{name}: {reason}")
    return CASES[name](folder)


if __name__ == "__main__":
    main()
