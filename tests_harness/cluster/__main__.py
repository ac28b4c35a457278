"""Two hosts and a real Slurm for as long as it takes: the figures of docs/cluster.md.

python -m tests_harness.cluster                 all cases, as root; about half an hour on two cores
python -m tests_harness.cluster hosts slurm     some of them
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests_harness.cluster import hosts, slurm
from tests_harness.cluster.long_hosts import Rows, host, link, skew
from tests_harness.cluster.long_hosts import hosts as both_hosts
from tests_harness.cluster.long_slurm import slurm as of_slurm
from tests_harness.cluster.submitit_sweep import sweep

CASES: dict[str, Callable[[Path], Rows]] = {
    "hosts": both_hosts,
    "host": host,
    "link": link,
    "skew": skew,
    "slurm": of_slurm,
    "sweep": sweep,
}
NEED_SLURM = ("slurm", "sweep")


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
    rows: Rows = {}
    print("| case | outcome |\n|---|---|", flush=True)
    for name in arguments.cases or CASES:
        if reason := slurm.missing() if name in NEED_SLURM else hosts.missing():
            sys.exit(f"{name}: {reason}")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = CASES[name](Path(folder))
        for case, (is_met, figures) in found.items():
            print(f"| {case} | {'' if is_met else 'MISSED: '}{figures} |", flush=True)
        print(f"<!-- {name}: {time.monotonic() - started:.0f} s -->", flush=True)
        rows |= found
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if not all(is_met for is_met, _ in rows.values()):
        sys.exit("A bar was missed.")


if __name__ == "__main__":
    main()
