"""Find runs again, and compare them: `python -m harness.runs` by another name.

python scripts/runs.py ls
python scripts/runs.py --help
"""

import sys

from harness.runs.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
