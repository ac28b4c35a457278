"""Write the starting point of an experiment, a model or a data set, which trains as it is.

    python scripts/new.py experiment NAME    conf/experiment/NAME.yaml
    python scripts/new.py model NAME         a network, conf/model/NAME.yaml and a test
    python scripts/new.py data NAME          a DataModule, conf/data/NAME.yaml and a test

They are copies, under the new name, of what is here already: the experiment `synthetic`, the model
`mlp`, the data `synthetic`. Nothing has to be registered: a file's name is the choice on the
command line. Needs Python 3.10; nothing has to be installed.
"""

import argparse
import ast
import builtins
import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORIGINALS = {"experiment": "synthetic", "model": "mlp", "data": "synthetic"}
CLASSES = {"model": "MLP", "data": "Synthetic"}
# What YAML or Hydra reads as something else than a word.
NO_WORDS = {"null", "none", "true", "false", "yes", "no", "on", "off", "nan", "inf"}
NOT_MEASURED = "# Not measured yet: write here how long it takes (s or min) and what it reaches.\n"


def main() -> None:
    """Write what the arguments name, and say how to run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=ORIGINALS)
    parser.add_argument("name", help="lower case, such as my_data")
    arguments = parser.parse_args()
    kind, name = arguments.kind, arguments.name
    check_name(name)
    check_class(kind, name)
    written = starting_point(kind, name)
    if there := [str(path.relative_to(ROOT)) for path in written if path.exists()]:
        sys.exit(f"{' and '.join(there)} exist already. Choose another name, or remove them first.")
    for path, text in written.items():
        path.write_text(text)
        print(f"wrote  {path.relative_to(ROOT)}")
    tests = [
        path for path in written if path.suffix == ".py" and path.is_relative_to(ROOT / "tests")
    ]
    tested = str(tests[0].relative_to(ROOT)) if tests else f"tests_harness/test_config.py -k {name}"
    print(f"run    python train.py {kind}={name}\ntest   pytest {tested}")


def check_name(name: str) -> None:
    """Exit with the reason where ``name`` cannot name a module and a choice."""
    is_word = name not in NO_WORDS and not keyword.iskeyword(name)
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,15}", name) or not is_word:
        sys.exit(
            f"{name!r} must be a name that Python can import: up to 16 lower case letters, numbers "
            "and underscores, such as my_data, and no word of Python or YAML."
        )


def check_class(kind: str, name: str) -> None:
    """Exit where the class would hide another one, or pytest would take it for a test."""
    if kind not in CLASSES:
        return
    new = class_name(name)
    if name.startswith("test") or hasattr(builtins, new):
        sys.exit(f"{new} means something to Python or pytest. Choose a name such as my_{name}.")
    for path, text in originals(kind).items():
        if path.suffix == ".py" and new in names(text):
            sys.exit(
                f"{path.relative_to(ROOT)}, which this starts from, uses another {new}. "
                f"Choose a name such as my_{name}."
            )


def class_name(name: str) -> str:
    """The class of a model or data set."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def names(code: str) -> set[str]:
    """What code calls by a bare name."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def originals(kind: str) -> dict[Path, str]:
    """The files that a starting point is copied from, with their text."""
    original = ORIGINALS[kind]
    (package,) = (path.parent for path in (ROOT / "src").glob("*/__init__.py"))
    folders = [ROOT / "conf" / kind]
    if kind in CLASSES:
        modules = "models" if kind == "model" else "data"
        folders += [package / modules, ROOT / "tests" / modules]
    found = {}
    for folder in folders:
        if folder.parts[-2] == "conf":
            source = folder / f"{original}.yaml"
        else:
            prefix = "test_" if folder.parent.name == "tests" else ""
            source = folder / f"{prefix}{original}.py"
        if not source.is_file():
            sys.exit(f"{source.relative_to(ROOT)}, which this starts from, is gone: restore it.")
        found[source] = source.read_text()
    return found


def starting_point(kind: str, name: str) -> dict[Path, str]:
    """The files of a starting point, with their text."""
    return {
        path.with_name(path.name.replace(ORIGINALS[kind], name)): renamed(text, kind, name)
        for path, text in originals(kind).items()
    }


def renamed(text: str, kind: str, name: str) -> str:
    """The text of an original under a new name, in the order that linters ask for."""
    original = ORIGINALS[kind]
    if kind == "experiment":
        text = re.sub(rf"experiment={original}\b", f"experiment={name}", text)
        return re.sub(r"(?m)^# Takes .*\n", NOT_MEASURED, text)
    text = text.replace(original, name)
    text = re.sub(rf"\b{CLASSES[kind]}(?=[A-Z]\w|\b)", class_name(name), text)
    # Imports stand in the order of their modules, and one of them has another name now.
    return re.sub(r"(?m)(?:^from \w+\.\S+ import .*\n)+", _sorted_lines, text)


def _sorted_lines(match: re.Match[str]) -> str:
    return "".join(sorted(match[0].splitlines(keepends=True), key=lambda line: line.split()[1]))


if __name__ == "__main__":
    main()
