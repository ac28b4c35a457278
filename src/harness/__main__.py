"""``python -m harness train model=mlp``: a command without a script, in the project's folder."""

import sys

from harness import main

if __name__ == "__main__":
    if sys.argv[1:2] not in (["train"], ["evaluate"], ["predict"]):
        sys.exit("Use python -m harness train, evaluate or predict, and words such as model=mlp.")
    main(sys.argv[1], "conf", sys.argv[2:])
