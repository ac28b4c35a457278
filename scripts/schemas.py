"""Write what an editor completes, explains and underlines the keys of conf/ with.

    python scripts/schemas.py      after a new class, argument or file of conf/

JSON schemas go to .schemas/, where .vscode/settings.json has VS Code look for them; docs/tools.md
tells of other editors. They follow the signature, the hints and the docstring of what each
`_target_` names, and the comments of the YAML files. Exit status: 0 written; 1 a file is no YAML.
"""

import argparse
import sys
from pathlib import Path

from harness.broken_builds import explained_imports
from harness.errors import UserError


def main() -> None:
    """Write the schemas, and tell what they cannot know."""
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    try:
        with explained_imports():
            from harness.schemas.files import FOLDER, write

            missing = write(Path(__file__).resolve().parents[1])
    except UserError as error:
        sys.exit(str(error))
    print(f"wrote  {FOLDER}/")
    if missing:
        print(f"cannot be imported here, so that any key passes: {', '.join(missing)}")


if __name__ == "__main__":
    main()
