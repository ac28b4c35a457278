"""Prove what this project promises on your own experiment: a few steps of it, in many ways.

    python scripts/prove.py experiment=mine
    python scripts/prove.py experiment=mine --strategies "ddp(4),dp(2)" trainer.max_steps=12
    python scripts/prove.py experiment=mine --json proof.json --keep runs

The words are what train.py takes. Everything runs on the CPU unless they say trainer.accelerator.
Exit status: 0 all is equal, refused with a sentence, or told by the run itself why it is not;
1 something differs or fails; 2 a mistake in the command, or one process does not train.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.names import program
from harness.prove.runs import Runs, strategy
from harness.quick_imports import quick_imports

if TYPE_CHECKING:
    from harness.prove.compare import Proof

MOST_ROWS = 16  # of the table; --json has all


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(
        program("harness.prove"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="key=value", help="as of train.py")
    add("--strategies", metavar="NAMES", help='such as "dp(2),ddp(3),ddp2(2x2)"')
    add("--keep", type=Path, metavar="DIR", help="keep the runs in a new folder")
    add("--json", type=Path, metavar="FILE", help="write all differences, for a program")
    options = parser.parse_intermixed_args(arguments)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _prove(options, Path(folder))
    except UserError as error:
        kept = " --keep DIR keeps it." if "run.log" in str(error) and not options.keep else ""
        print(f"{error}{kept}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped; nothing is proved.", file=sys.stderr)
        return 130


def _prove(options: argparse.Namespace, folder: Path) -> int:
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        raise UserError(f"--keep {options.keep}: there is something in it. Name a new folder.")
    if options.json and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: there is no such folder.")
    names = options.strategies.split(",") if options.strategies else ()
    for name in names:
        strategy(name)
    runs, began = Runs(options.words, (options.keep or folder).resolve()), time.monotonic()
    with quick_imports():
        from harness.prove.compare import STRATEGIES, prove

    def tell(name: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  running: {name}", file=sys.stderr, flush=True)

    proof = prove(runs, names or STRATEGIES, tell)
    print(table(proof))
    if options.json:
        options.json.write_text(json.dumps(asdict(proof), indent=2) + "\n")
    return int(any(one.is_broken for one in proof.verdicts))


def table(proof: "Proof") -> str:
    """The largest differences by name and way to run, then a verdict for each way."""
    columns = [one for one in proof.verdicts if one.differences]
    names = list(dict.fromkeys(name for one in columns for name in one.differences))

    def size(name: str) -> tuple[bool, float]:
        each = [one.differences[name] for one in columns if name in one.differences]
        return max((not found.is_equal, found.distance) for found in each)

    shown = sorted(names, key=size, reverse=True)[:MOST_ROWS]
    width = max([*map(len, shown), 18]) + 2
    lines = [f"{proof.experiment}: {proof.settings}", ""]
    lines.append(" " * width + "".join(f"{one.name:>18}" for one in columns))
    for name in [name for name in names if name in shown]:
        found = [one.differences.get(name) for one in columns]
        cells = [
            "" if one is None else f"{one.distance:.1e}{' !'[not one.is_equal]}" for one in found
        ]
        lines.append(f"{name:{width}}" + "".join(f"{cell:>18}" for cell in cells))
    if len(names) > MOST_ROWS:
        lines.append(f"and {len(names) - MOST_ROWS} more, which differ by less")
    lines.append("")
    for one in proof.verdicts:
        said = one.said.replace("\n", f"\n{'':30}")
        lines.append(f"{one.name:18}{one.verdict:12}{said}")
    return "\n".join([*lines, *(f"\n{note}" for note in proof.notes)])


if __name__ == "__main__":
    sys.exit(main())
