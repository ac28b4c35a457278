"""The command evaluate of the small project that the library's tests use."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Its package, and what the tests name in YAML.
sys.path[1:1] = [str(HERE / "src"), str(HERE.parents[1])]

from harness import main  # noqa: E402

if __name__ == "__main__":
    main("evaluate", conf=HERE / "conf")
