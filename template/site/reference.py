"""Write the pages of ``harness/docs/reference``: the texts of ``intro``, and what follows them.

    python -m template.site.reference

The pages are committed, so that GitHub shows them and other pages link into them. A test compares
them with their sources. Versions of Python word the help of commands differently, so that only
Python 3.11 writes and compares commands.md.
"""

import sys
from pathlib import Path

from template.site import api_page, commands_page, config_page, verdicts_page
from template.site.markdown import ROOT

FOLDER = ROOT / "harness" / "docs" / "reference"
PAGES = {"config": config_page.write, "api": api_page.write, "verdicts": verdicts_page.write}
if sys.version_info[:2] == (3, 11):
    PAGES["commands"] = commands_page.write
NOTE = "<!-- Written by python -m template.site.reference: edit its sources instead. -->\n\n"


def main(folder: Path = FOLDER) -> None:
    """Write the pages into a folder."""
    for name, write in PAGES.items():
        intro = (Path(__file__).parent / "intro" / f"{name}.md").read_text()
        (folder / f"{name}.md").write_text(f"{NOTE}{intro}\n{write().rstrip()}\n")


if __name__ == "__main__":
    main()
