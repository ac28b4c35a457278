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
    from harness.prove.proof import Proof

MOST_ROWS = 16  # of the table; --json has all
NAME_WIDTH = 36


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
        from harness.prove.proof import STRATEGIES, prove

    def tell(name: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  running: {name}", file=sys.stderr, flush=True)

    proof = prove(runs, names or STRATEGIES, tell)
    print(table(proof, is_coloured=sys.stdout.isatty()))
    if options.json:
        options.json.write_text(json.dumps(asdict(proof), indent=2) + "\n")
    return int(any(one.is_broken for one in proof.verdicts))


def table(proof: "Proof", is_coloured: bool = False) -> str:
    """The largest differences by name and way to run, then a verdict for each way."""
    red, normal = ("\x1b[31m", "\x1b[0m") if is_coloured else ("", "")
    columns = [one for one in proof.verdicts if one.differences]
    names = list(dict.fromkeys(name for one in columns for name in one.differences))

    def rank(name: str) -> tuple[bool, float]:
        return max(one.differences[name].rank for one in columns if name in one.differences)

    shown = sorted(names, key=rank, reverse=True)[:MOST_ROWS]
    heads = [f"{one.name:>{max(10, len(one.name) + 2)}}" for one in columns]
    lines = [f"{proof.experiment}: {proof.settings}", "", " " * NAME_WIDTH + "".join(heads)]
    for name in [name for name in names if name in shown]:
        line = f"{name[-NAME_WIDTH:]:{NAME_WIDTH}}"
        for one, head in zip(columns, heads, strict=True):
            found = one.differences.get(name)
            text = "" if found is None else f"{found.distance:.1e}" if found.distance else "0"
            text = f"{text:>{len(head)}}"
            line += text if found is None or found.is_equal else f"{red}{text}{normal}"
        lines.append(line)
    if len(names) > MOST_ROWS:
        lines.append(f"and {len(names) - MOST_ROWS} more, which differ by less")
    lines.append("")
    for one in proof.verdicts:
        start, end = (red, normal) if one.is_broken else ("", "")
        said = one.said.replace("\n", f"\n{'':30}")
        lines.append(f"{one.name:18}{start}{one.verdict:12}{end}{said}")
    return "\n".join([*lines, *(f"\n{note}" for note in proof.notes)])


if __name__ == "__main__":
    sys.exit(main())
