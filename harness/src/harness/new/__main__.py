"""Write the first version of a network, a module, data or an experiment, ready to train.

    python scripts/new.py model NAME         a network for the classifier
    python scripts/new.py module NAME        a LightningModule of your own
    python scripts/new.py data NAME          a data set, read sample by sample
    python scripts/new.py experiment NAME    a choice of data, model and settings

The command also writes a YAML file and a test. It registers nothing: train.py finds the YAML file
by its name. Run the command in the project's folder.
"""

import argparse
import keyword
import re
import sys
from pathlib import Path

from harness.display import typed_command
from harness.errors import outlive_readers
from harness.files import LIBRARY

TEMPLATES = LIBRARY / "new"
YAML_NAMES = {"null", "none", "true", "false", "yes", "no", "on", "off", "nan", "inf"}


def main() -> None:
    """Write the files, and print the commands that run and test them."""
    outlive_readers()  # write all files, also with `| head`
    parser = argparse.ArgumentParser(
        typed_command("harness.new"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=("model", "module", "data", "experiment"))
    parser.add_argument("name", help="lower case, such as my_data")
    arguments = parser.parse_args()
    kind, name = arguments.kind, arguments.name
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,15}", name) or name in {*keyword.kwlist, *YAML_NAMES}:
        sys.exit(
            f"{name!r} cannot be a name. Use up to 16 lower case letters, digits and underscores, "
            "such as my_data, and no keyword of Python or YAML."
        )
    packages = [path.parent.name for path in Path("src").glob("*/__init__.py")]
    if len(packages) != 1 or not Path("conf", "train.yaml").is_file():
        sys.exit(
            "This folder has no conf/train.yaml, or not exactly one package in src/. Run the "
            "command in a project's folder."
        )
    values = {"NAME": name, "PACKAGE": packages[0], "CLASS": name.title().replace("_", "")}
    group, folder = ("data", "data") if kind == "data" else ("model", "models")
    if kind == "experiment":
        group = kind
        values |= {
            "DATA": choice("data", name, "synthetic"),
            "MODEL": choice("model", name, "mlp"),
        }
    files = {f"conf/{group}/{name}.yaml": f"{kind}.yaml"}
    if kind != "experiment":
        files[f"src/{packages[0]}/{folder}/{name}.py"] = f"{kind}.py.txt"
        files[f"tests/{folder}/test_{name}.py"] = f"test_{kind}.py.txt"
    texts = {path: (TEMPLATES / file).read_text() for path, file in files.items()}
    if existing := [path for path in texts if Path(path).exists()]:
        sys.exit(
            f"These files exist already: {', '.join(existing)}. Choose another name, or remove "
            "them first."
        )
    if re.search(rf"\b{values['CLASS']}\b", "".join(texts.values())):
        sys.exit(
            f"The class {values['CLASS']} would clash with a name that its file imports. Choose "
            f"another name, such as my_{name}."
        )
    for path, text in texts.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(fill_in(text, values))
        print(f"wrote  {path}")
    test = "tests/test_config.py" if kind == "experiment" else [*texts][-1]
    print(f"run    python train.py {group}={name}\ntest   make test ARGS={test}")


def choice(group: str, *preferred: str) -> str:
    """Return the name of a config in ``conf/<group>``, a preferred one if it exists."""
    names = sorted(path.stem for path in Path("conf", group).glob("[!_]*.yaml"))
    if not names:
        sys.exit(
            f"An experiment needs a config in conf/{group}/, but this folder has none. Write a "
            f"config with python scripts/new.py {group} my_{group}."
        )
    return next((name for name in preferred if name in names), names[0])


def fill_in(text: str, values: dict[str, str]) -> str:
    """Replace a template's placeholders, and sort its imports by module."""
    text = re.sub(rf"(?<![A-Z])({'|'.join(values)})(?![A-Z])", lambda m: values[m[0]], text)
    own = rf"(?m)(?:^from (?:harness|{values['PACKAGE']})\b.*\n)+"
    return re.sub(own, lambda match: "".join(sorted(match[0].splitlines(keepends=True))), text)


if __name__ == "__main__":
    main()
