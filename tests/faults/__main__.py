"""Stop runs in every way, and see whether anything is lost.

python -m tests.faults sweep                 resume from every step of every configuration
"""

import argparse
import tempfile
from pathlib import Path

from tests.faults import resume_sweep


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fault", choices=["sweep"])
    parser.add_argument("--only", help="configurations whose name contains this")
    arguments = parser.parse_args()
    for name in resume_sweep.CONFIGURATIONS:
        if arguments.only and arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = dict(resume_sweep.sweep(name, Path(folder)))
        good = sum(not differences for differences in found.values())
        print(f"{name}: {good} of {len(found)} resumes equal by bit", flush=True)
        for step, differences in found.items():
            if differences:
                print("  ", step, len(differences), differences[:4], flush=True)


if __name__ == "__main__":
    main()
