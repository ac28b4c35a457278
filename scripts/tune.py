"""Find settings of an experiment by trying them: `python -m harness.tune` by another name.

python scripts/tune.py lr experiment=synthetic
python scripts/tune.py --help
"""

import sys

from harness.tune.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
