"""Writes docs/public_modules.md: python -m tests_harness.packages.table

The cells come from expected.py, which `make packages` holds against runs.
"""

from pathlib import Path

from tests_harness.packages.expected import COLUMNS, PACKAGES, Differs, Refused

PAGE = Path(__file__).parents[2] / "docs" / "public_modules.md"
HEAD = """# Public modules by YAML alone

Modules that others have written, each run by a YAML file that names it, with no line of Python
around it. The files are in `tests_harness/packages/conf/experiment`; `make packages` sets up an
environment with the pinned packages and checks every cell. A module may be written for `lightning`
or for `pytorch_lightning`.

```bash
python train.py "hydra.searchpath=[file://tests_harness/packages/conf]" experiment=boring
```

Lightning's own are allowed from the start; the package of another is written into
`conf/rules.yaml` first, as in `allowed: [project, chemprop]`.
"""


def page() -> str:
    """The page's text."""
    notes: dict[str, int] = {}
    lines = [
        "| module | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for package in PACKAGES.values():
        cells = []
        for column in COLUMNS:
            cell = package.cells.get(column)
            if cell is None:
                cells.append("works")
                continue
            number = notes.setdefault(cell.why, len(notes) + 1)
            cells.append(f"{_word(cell)} <sup>{number}</sup>")
        lines.append(f"| {package.title} | " + " | ".join(cells) + " |")
    columns = [f"- **{name}**: {claim}." for name, claim in COLUMNS.items()]
    footnotes = [f"{number}. {why[0].upper()}{why[1:]}." for why, number in notes.items()]
    closing = (
        "*Refused* ends with status 1 and a sentence, and *differs* works and ends with other\n"
        "numbers, for the reason that the note gives:"
    )
    parts = [HEAD.rstrip(), "\n".join(lines), "\n".join(columns), closing, "\n".join(footnotes)]
    return "\n\n".join(parts) + "\n"


def _word(cell: Refused | Differs) -> str:
    return "refused" if isinstance(cell, Refused) else "differs"


if __name__ == "__main__":
    PAGE.write_text(page())
