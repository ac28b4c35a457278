"""Write a starting point that trains as it is: a network, a module, data or an experiment.

    python scripts/new.py model NAME              a network for the classifier
    python scripts/new.py module NAME             a LightningModule of your own
    python scripts/new.py data NAME               a data set, read sample by sample
    python scripts/new.py data NAME --csv FILE    a table; its last column is the target
    python scripts/new.py experiment NAME         a choice of data, model and settings

Each comes with its YAML file, and with a test that you keep. Nothing has to be registered: a file's
name is the choice on the command line. Type it in the project's folder.
"""

import argparse
import builtins
import csv
import json
import keyword
import re
import sys
from pathlib import Path

import harness
from harness.names import program

TEMPLATES = Path(harness.__path__[0], "new")
MOST_CLASSES = 10  # whole numbers with more values than these are amounts
# What Python, YAML or Hydra reads as something else than a name.
WORDS = {*keyword.kwlist, "null", "none", "true", "false", "yes", "no", "on", "off", "nan", "inf"}


def main() -> None:
    """Write what the arguments name, and say how to run it."""
    parser = argparse.ArgumentParser(
        program("harness.new"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=("model", "module", "data", "experiment"))
    parser.add_argument("name", help="lower case, such as my_data")
    parser.add_argument("--csv", metavar="FILE", help="a table; its last column is the target")
    arguments = parser.parse_args()
    kind, name = arguments.kind, arguments.name
    if arguments.csv and kind != "data":
        sys.exit(f"--csv belongs to data, not to {kind}.")
    check_name(name)
    if not Path("conf", "train.yaml").is_file():
        sys.exit("There is no conf/train.yaml here. Type it in the project's folder.")
    group = "model" if kind == "module" else kind  # of conf/
    run = f"python train.py {group}={name}"
    words = {"NAME": name, "CLASS": class_name(name), "PACKAGE": package()}
    if arguments.csv:
        columns, are_classes = read_columns(arguments.csv)
        table = Path(arguments.csv).resolve()
        table = table.relative_to(Path.cwd()) if table.is_relative_to(Path.cwd()) else table
        words |= {"PATH": json.dumps(str(table)), "TARGET": json.dumps(columns[-1])}
        words |= {"COLUMNS": ", ".join(columns), "TRUTH": json.dumps(are_classes)}
        words["MODEL"] = "table_mlp" if are_classes else "table_regressor"
        print(f"target {columns[-1]}: {'classes' if are_classes else 'numbers'}")
        run += f" model={words['MODEL']}"
        kind = "csv"
    files = {f"conf/{group}/{name}.yaml": f"{kind}.yaml"}
    folder = "data" if group == "data" else "models"
    if kind in ("model", "module", "data"):
        files[f"src/{package()}/{folder}/{name}.py"] = f"{kind}.py.txt"
        check_class(name, f"{kind}.py.txt", f"test_{kind}.py.txt")
    if kind != "experiment":
        files[f"tests/{folder}/test_{name}.py"] = f"test_{kind}.py.txt"
    if there := [path for path in files if Path(path).exists()]:
        sys.exit(f"{' and '.join(there)} exist already. Choose another name, or remove them first.")
    for path, template in files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(filled((TEMPLATES / template).read_text(), words))
        print(f"wrote  {path}")
    tested = f"tests/test_config.py -k {name}" if kind == "experiment" else list(files)[-1]
    print(f"run    {run}\ntest   pytest {tested}")


def check_name(name: str) -> None:
    """Exit with the reason where ``name`` cannot name a module and a choice."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,15}", name) or name in WORDS:
        sys.exit(
            f"{name!r} must be a name that Python can import: up to 16 lower case letters, numbers "
            "and underscores, such as my_data, and no word of Python or YAML."
        )


def check_class(name: str, *templates: str) -> None:
    """Exit where the class would hide another one, or pytest would take it for a test."""
    new = class_name(name)
    if name.startswith("test") or hasattr(builtins, new):
        sys.exit(f"{new} means something to Python or pytest. Choose a name such as my_{name}.")
    for template in templates:
        if re.search(rf"\b{new}\b", (TEMPLATES / template).read_text()):
            sys.exit(f"The new file uses another {new}. Choose a name such as my_{name}.")


def class_name(name: str) -> str:
    """The class of a model or data set."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def package() -> str:
    """The project's package: the one beside the harness."""
    found = {path.parent.name for path in Path("src").glob("*/__init__.py")} - {"harness"}
    if len(found) != 1:
        sys.exit(f"src/ must hold one package beside harness, and holds {len(found)}.")
    return found.pop()


def read_columns(path: str) -> tuple[list[str], bool]:
    """The names of a table's columns, and whether the last one holds classes."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            columns = [name.strip() for name in next(rows, [])]
            targets = [row[-1].strip() for row in rows if row]
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--csv {path} cannot be read: {error}.")
    if len(columns) < 2:
        sys.exit(f"--csv {path} must begin with the names of two columns or more, and commas.")
    if not any(targets):
        sys.exit(f"--csv {path}: its last column, {columns[-1]}, is the target, and is empty.")
    known = {target for target in targets if target}
    are_whole = all(target.lstrip("+-").isdecimal() for target in known)
    are_few = len(known) <= min(MOST_CLASSES, len(targets) / 3)
    return columns, (are_whole and are_few) or not any(map(is_number, known))


def is_number(text: str) -> bool:
    """Whether a cell holds a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def filled(text: str, words: dict[str, str]) -> str:
    """A template's text with its words in place, its imports in the order of their modules."""
    text = re.sub(rf"(?<![A-Z])({'|'.join(words)})(?![A-Z])", lambda match: words[match[0]], text)
    own = rf"(?m)(?:^from (?:harness|{words['PACKAGE']})\b.*\n)+"
    return re.sub(own, lambda match: "".join(sorted(match[0].splitlines(keepends=True))), text)


if __name__ == "__main__":
    main()
