"""``python -m harness train model=mlp``: a command without a script, in the project's folder."""

import sys

from harness.command.main import main

if __name__ == "__main__":
    if sys.argv[1:2] not in (["train"], ["evaluate"], ["predict"]):
        sys.exit(
            "Use python -m harness train, evaluate or predict, and overrides such as model=mlp."
        )
    arguments, conf = sys.argv[2:], "conf"
    if arguments and arguments[0].startswith("conf="):  # for programs with another config folder
        conf = arguments.pop(0).removeprefix("conf=")
    main(sys.argv[1], conf, arguments)
