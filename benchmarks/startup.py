"""How long commands take that do not train, against importing the framework.

    python benchmarks/startup.py [--repeats 7] [--json startup.json]

Contenders are interleaved, so that a busy machine slows all of them alike: read the ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
BASELINE = "import pytorch_lightning"
GOAL = 0.15
COMMANDS = {
    BASELINE: [PYTHON, "-c", "import pytorch_lightning"],
    "train.py --help": [PYTHON, "train.py", "--help"],
    "train.py --cfg job": [PYTHON, "train.py", "--cfg", "job"],
    "tab completion": [PYTHON, "train.py", "-sc", "query=bash"],
    "unknown key": [PYTHON, "train.py", "trainer.devcies=2"],
    "unknown choice": [PYTHON, "train.py", "strategy=nope"],
    "wrong type": [PYTHON, "train.py", "data.batch_size=many"],
    "no such checkpoint": [PYTHON, "evaluate.py", "checkpoint=nope.ckpt"],
}
# Hydra's completion reads the line to complete from the shell's variables.
COMPLETION = {"COMP_LINE": "train.py strategy=d", "COMP_POINT": "19", "COMP_CWORD": "1"}


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, capture_output=True, check=False, env=os.environ | COMPLETION)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for command in COMMANDS.values():
        seconds(command)  # fills the disk cache
    for _ in range(arguments.repeats):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    baseline = statistics.median(times[BASELINE])
    print(f"{'':28} median s   (min - max)      ratio   goal {GOAL}")
    for name, values in times.items():
        median = statistics.median(values)
        spread = f"({min(values):.2f} - {max(values):.2f})"
        print(f"{name:28} {median:8.2f}   {spread:15} {median / baseline:6.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(times, indent=2) + "\n")


if __name__ == "__main__":
    main()
