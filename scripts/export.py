"""Export a run's network for other programs: `python -m harness.export` by another name.

python scripts/export.py outputs/default/<run> -o net.onnx
"""

import sys

from harness.export import main  # if this fails: . .venv/bin/activate

if __name__ == "__main__":
    sys.exit(main())
