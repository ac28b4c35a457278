"""``python -m harness train model=mlp``: a command without a script, in the project's folder."""

import sys

from harness.command.main import main

if __name__ == "__main__":
    if sys.argv[1:2] not in (["train"], ["evaluate"], ["predict"]):
        sys.exit("Use python -m harness train, evaluate or predict, and words such as model=mlp.")
    words = sys.argv[2:]
    given = words and words[0].startswith("conf=")  # by a program that has its files elsewhere
    main(sys.argv[1], words.pop(0).removeprefix("conf=") if given else "conf", words)
