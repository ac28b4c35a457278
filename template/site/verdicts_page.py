"""Write the page of verdicts: how each kind of module and loader trains under each strategy.

In: ``harness/tests/verdicts/table.csv``. Out: Markdown.
"""

import csv

from template.site.markdown import cell, table
from template.site.yaml_keys import ROOT

TABLE = ROOT / "harness" / "tests" / "verdicts" / "table.csv"
HEAD = """# Verdicts

This page lists how each kind of module, loader and public package behaves under each strategy.
Each cell was measured on the CPU: the kind was trained under the strategy, and compared with one
process.

| verdict | meaning |
| --- | --- |
| equal | equal to one process, to 1e-9 |
| set | equal with a setting that the error names |
| **warned** | different, and the run logs a warning |
| **refused** | the run stops with an error that has the change to make |
| **silent** | different, without a warning |

`ddp(3)` is ddp with three processes, and `ddp2(2x2)` is ddp2 with two processes of two devices
each. The last column quotes the warning or the error. The data are in
`harness/tests/verdicts/table.csv`, and [strategies](../strategies.md#any-loss) has the rules
behind them.
"""
GROUPS = {
    "module": ("Modules", "Modules as researchers write them."),
    "parity": ("Modules for the parity check", "Modules that were written for the parity check."),
    "loader": ("Loaders", "Loaders and samplers, in a run that was not stopped."),
    "resumed": ("Resumed loaders", "The same, resumed in the middle of an epoch."),
    "public": ("Public packages", "Modules of public packages, each with YAML files alone."),
}
RESUMED = ", resumed"
SHOWN = {"told": "**warned**", "refused": "**refused**", "silent": "**silent**"}


def write() -> str:
    """Return the page."""
    with TABLE.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    for row in rows:
        if row["strategy"].endswith(RESUMED):
            row["group"], row["strategy"] = "resumed", row["strategy"].removesuffix(RESUMED)
    parts = [HEAD]
    for group, (title, text) in GROUPS.items():
        chosen = [row for row in rows if row["group"] == group]
        kinds = [*dict.fromkeys(row["kind"] for row in chosen)]
        strategies = [*dict.fromkeys(row["strategy"] for row in chosen)]
        cells = {(row["kind"], row["strategy"]): row for row in chosen}
        parts.append(f"## {title}\n\n{text} There are {len(kinds)}.\n")
        lines = []
        for kind in kinds:
            found = [cells.get((kind, strategy)) for strategy in strategies]
            verdicts = [row["verdict"] if row else "-" for row in found]
            says = dict.fromkeys(row["says"] for row in found if row and row["says"])
            shown = [SHOWN.get(verdict, verdict) for verdict in verdicts]
            lines.append([cell(kind), *shown, "; ".join(map(cell, says))])
        parts.append(table(["kind", *strategies, "message"], lines))
    return "\n".join(parts)
