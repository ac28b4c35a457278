"""Find runs, and compare them: python scripts/runs.py --help."""

import sys

from harness.compare import main

if __name__ == "__main__":
    sys.exit(main())
