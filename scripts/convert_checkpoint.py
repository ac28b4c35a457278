"""Turn training checkpoints into plain weights, held against the networks of this project.

    python scripts/convert_checkpoint.py outputs/default/<run>/checkpoints/best.ckpt -o weights.pt
    python scripts/convert_checkpoint.py --help

It is `python -m harness.convert --package <each of src, and each that conf/rules.yaml allows>`.
"""

from pathlib import Path

import yaml

from harness.convert.__main__ import run

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    rules = yaml.safe_load((ROOT / "conf" / "rules.yaml").read_text())
    own = [path.parent.name for path in ROOT.glob("src/*/__init__.py")]
    run(packages=list(dict.fromkeys([*own, *(rules.get("allowed") or [])])))
