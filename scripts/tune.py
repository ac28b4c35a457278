"""Find batch size, workers and learning rate: `python -m harness.tune` by another name.

python scripts/tune.py experiment=mine
"""

import sys

from harness.tune.__main__ import main  # if this fails: . .venv/bin/activate

if __name__ == "__main__":
    sys.exit(main())
