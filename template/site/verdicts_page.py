"""Write the page of verdicts: how each kind of module and loader trains under each strategy.

In: ``harness/tests/verdicts/table.csv``. Out: Markdown.
"""

import csv

from template.site.markdown import ROOT, inline, table

TABLE = ROOT / "harness" / "tests" / "verdicts" / "table.csv"
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
    groups: dict[str, dict[str, dict[str, dict[str, str]]]] = {name: {} for name in GROUPS}
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            strategy = row["strategy"].removesuffix(RESUMED)
            group = row["group"] if strategy == row["strategy"] else "resumed"
            groups[group].setdefault(row["kind"], {})[strategy] = row
    parts = []
    for group, kinds in groups.items():
        title, text = GROUPS[group]
        strategies = [*dict.fromkeys(name for rows in kinds.values() for name in rows)]
        lines = []
        for kind, rows in kinds.items():
            verdicts = [rows[name]["verdict"] if name in rows else "-" for name in strategies]
            says = dict.fromkeys(inline(row["says"]) for row in rows.values() if row["says"])
            shown = [SHOWN.get(verdict, verdict) for verdict in verdicts]
            lines.append([inline(kind), *shown, "; ".join(says)])
        parts.append(f"## {title}\n\n{text} There are {len(kinds)}.\n")
        parts.append(table(["kind", *strategies, "message"], lines))
    return "\n".join(parts)
