"""A proof on one screen, and as JSON."""

import json
import textwrap
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from harness.errors import UserError
from harness.prove.promises import prove
from harness.prove.verdicts import BROKEN, HOLDS, STRATEGIES, Proof

STYLES = {BROKEN: "red", HOLDS: "green"}
WIDTH = 100  # characters of a line that is no line of code
INDENT = 33


def prove_and_tell(options: Namespace, folder: Path) -> int:
    """Prove what the options name, print it, and return the exit status.

    Raises:
        UserError: for a mistake in the command.
    """
    if options.json and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: there is no such folder.")
    screen = Console(highlight=False, markup=False, soft_wrap=True)
    progress = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with progress.status("starting") as status:  # seen on a terminal only

        def tell(name: str) -> None:
            if progress.is_terminal:
                status.update(f"running: {name}")
            else:
                progress.print(f"running: {name}")

        proof = prove(
            options.overrides,
            folder.resolve(),
            num_steps=options.steps,
            strategies=options.strategies.split(",") if options.strategies else STRATEGIES,
            precision=options.precision,
            timeout=options.timeout,
            tell=tell,
        )
    show(proof, screen)
    if options.json:
        options.json.write_text(json.dumps(asdict(proof), indent=2) + "\n")
    return int(proof.is_broken)


def show(proof: Proof, screen: Console) -> None:
    """Print the table."""
    screen.print(f"{proof.experiment}: {proof.settings}, {proof.seconds:.0f} s\n")
    for verdict in proof.verdicts:
        screen.print(f"{verdict.promise:<18}", end="")
        screen.print(f"{verdict.status:<15}", style=STYLES.get(verdict.status), end="")
        lines = [*_wrapped(verdict.said), *_wrapped(verdict.why)]
        screen.print(f"\n{'':{INDENT}}".join(lines))
        if verdict.line:
            screen.print(f"{'':{INDENT}}{verdict.line}", style="bold")
    for i, note in enumerate(proof.notes):
        screen.print(f"\n{'by nature':<18}" if i == 0 else f"{'':18}", end="")
        screen.print(f"\n{'':18}".join(_wrapped(note)))


def _wrapped(text: str) -> list[str]:
    return [part for line in text.splitlines() for part in textwrap.wrap(line, WIDTH)]
