"""Write the pages of ``harness/docs/reference``, which are committed.

    python -m template.site.reference          write them
    python -m template.site.reference --check  exit with 1 if a page is out of date

They are committed, so that GitHub shows them and other pages link into them. A test runs the
check. The help of commands depends on the version of Python, so that page is written with 3.11.
"""

import argparse
import sys

from template.site import api_page, commands_page, config_page, verdicts_page
from template.site.yaml_keys import ROOT

FOLDER = ROOT / "harness" / "docs" / "reference"
PAGES = {
    "config.md": config_page.write,
    "commands.md": commands_page.write,
    "api.md": api_page.write,
    "verdicts.md": verdicts_page.write,
}
NOTE = "<!-- Written by python -m template.site.reference: edit its sources instead. -->\n\n"
IS_WRITTEN = sys.version_info[:2] == (3, 11)  # whether this Python writes the page of commands


def pages() -> dict[str, str]:
    """Return the text of each page that this version of Python writes."""
    names = [name for name in PAGES if IS_WRITTEN or name != "commands.md"]
    return {name: NOTE + PAGES[name]().rstrip() + "\n" for name in names}


def outdated() -> list[str]:
    """Return the names of the pages that differ from what their sources give."""
    texts = pages()
    before = {name: FOLDER / name for name in texts}
    return [
        name
        for name, path in before.items()
        if not path.is_file() or path.read_text() != texts[name]
    ]


def main() -> int:
    """Write or check the pages, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        names = outdated()
        for name in names:
            print(f"harness/docs/reference/{name} is out of date. Run make reference.")
        return min(len(names), 1)
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
