"""Find runs, and compare them: python scripts/runs.py --help."""

import sys

from harness.compare import main  # if this fails: . .venv/bin/activate

if __name__ == "__main__":
    sys.exit(main())
