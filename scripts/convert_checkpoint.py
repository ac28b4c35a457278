"""Turn training checkpoints into plain weights: `python -m harness.convert` by another name.

python scripts/convert_checkpoint.py outputs/default/<run>/checkpoints/best.ckpt -o weights.pt
python scripts/convert_checkpoint.py --help
"""

from harness.convert.__main__ import run  # if this fails: . .venv/bin/activate

if __name__ == "__main__":
    run()
