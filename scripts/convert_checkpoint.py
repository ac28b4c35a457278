"""Turn training checkpoints into plain weights, held against the networks of this project.

    python scripts/convert_checkpoint.py outputs/default/<run>/checkpoints/best.ckpt -o weights.pt
    python scripts/convert_checkpoint.py --help

It is `python -m harness.convert --package <each package in src>`.
"""

from pathlib import Path

from harness.convert.__main__ import run

SOURCE = Path(__file__).parents[1] / "src"

if __name__ == "__main__":
    run(packages=[path.parent.name for path in SOURCE.glob("*/__init__.py")])
