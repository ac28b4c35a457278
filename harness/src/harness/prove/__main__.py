"""Prove what this project promises on your own experiment: a few steps of it, in many ways.

    python scripts/prove.py experiment=mine
    python scripts/prove.py experiment=mine --strategies "ddp(4),dp(2)" trainer.max_steps=12
    python scripts/prove.py experiment=mine --json proof.json --keep runs

The words are what train.py takes. Runs are on the CPU and in 64 bits unless they say
trainer.accelerator and trainer.precision=32-true.
Exit status: 0 all is equal, refused with a sentence, or the run itself has warned why it is not;
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
from harness.prove.runs import Runs, words_of

if TYPE_CHECKING:
    from harness.prove.compare import Verdict

MOST_ROWS = 16  # of the table; --json has all


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove, print a table, and return the exit status."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(program("harness.prove"), None, __doc__, formatter_class=kind)
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
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped; nothing is proved.", file=sys.stderr)
        return 130


def _prove(options: argparse.Namespace, folder: Path) -> int:
    if options.keep and options.keep.exists():
        raise UserError(f"--keep {options.keep}: it exists. Name a new folder.")
    if options.json and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: there is no such folder.")
    names = options.strategies.split(",") if options.strategies else ()
    for name in names:
        words_of(name)
    runs, began = Runs(options.words, (options.keep or folder).resolve()), time.monotonic()
    from harness.prove.compare import STRATEGIES, prove  # torch and Lightning; seconds

    def report(name: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  running: {name}", file=sys.stderr, flush=True)

    verdicts = prove(runs, names or STRATEGIES, report)
    print(f"{runs.typed}: {runs.num_steps} steps, {runs.precision}\n\n{table(verdicts)}")
    if options.json:
        proof = {"experiment": runs.typed, "verdicts": [asdict(verdict) for verdict in verdicts]}
        options.json.write_text(json.dumps(proof, indent=2) + "\n")
    return int(any(one.is_broken for one in verdicts))


def table(verdicts: "Sequence[Verdict]") -> str:
    """Lay out the largest differences by name and way to run, and a verdict for each way."""
    columns = [one for one in verdicts if one.differences]
    names = list({name: None for one in columns for name in one.differences})

    def cell(one: "Verdict", name: str) -> tuple[bool, float]:
        distance, is_equal = one.differences.get(name, (0.0, True))
        return not is_equal, distance

    largest = sorted(names, key=lambda name: max(cell(one, name) for one in columns), reverse=True)
    width = max([*map(len, largest[:MOST_ROWS]), 20]) + 2
    lines = [" " * width + "".join(f"{one.name:>20}" for one in columns)]
    for name in [name for name in names if name in largest[:MOST_ROWS]]:
        cells = [f"{far:.1e}{'!' * differs}" for differs, far in (cell(x, name) for x in columns)]
        lines.append(f"{name:{width}}" + "".join(f"{text:>20}" for text in cells))
    lines += [f"and {len(names) - MOST_ROWS} more, which differ by less"] * (len(names) > MOST_ROWS)
    for one in verdicts:
        lines.append(f"{one.name:20}{one.verdict:10}" + one.reason.replace("\n", f"\n{'':30}"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
