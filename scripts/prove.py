"""Compare strategies on your experiment: `python -m harness.prove` by another name.

python scripts/prove.py experiment=mine
"""

import sys

from harness.prove.__main__ import main  # if this fails: . .venv/bin/activate

if __name__ == "__main__":
    sys.exit(main())
