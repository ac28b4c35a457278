"""Write a starting point that trains as it is: a network, a module, data or an experiment.

    python scripts/new.py model NAME         a network for the classifier
    python scripts/new.py module NAME        a LightningModule of your own
    python scripts/new.py data NAME          a data set, read sample by sample
    python scripts/new.py experiment NAME    a choice of data, model and settings

Each comes with its YAML file, and with a test that you keep. Nothing has to be registered: a file's
name is the choice on the command line. Type it in the project's folder.
"""

import argparse
import keyword
import re
import sys
from pathlib import Path

from harness.files import LIBRARY
from harness.names import program

TEMPLATES = LIBRARY / "new"
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
    arguments = parser.parse_args()
    kind, name = arguments.kind, arguments.name
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,15}", name) or name in WORDS:
        sys.exit(
            f"{name!r} must be up to 16 lower case letters, numbers and underscores, such as "
            "my_data, and no word of Python or YAML."
        )
    packages = [path.parent.name for path in Path("src").glob("*/__init__.py")]
    if len(packages) != 1 or not Path("conf", "train.yaml").is_file():
        sys.exit(
            "Type it in a project's folder, which has conf/train.yaml and one package in src/."
        )
    words = {"NAME": name, "PACKAGE": packages[0], "CLASS": name.title().replace("_", "")}
    group, folder = ("data", "data") if kind == "data" else ("model", "models")
    if kind == "experiment":
        group = kind
        words |= {
            "DATA": choice("data", name, "synthetic"),
            "MODEL": choice("model", name, "mlp"),
        }
    files = {f"conf/{group}/{name}.yaml": f"{kind}.yaml"}
    if kind != "experiment":
        files[f"src/{packages[0]}/{folder}/{name}.py"] = f"{kind}.py.txt"
        files[f"tests/{folder}/test_{name}.py"] = f"test_{kind}.py.txt"
    texts = {path: (TEMPLATES / file).read_text() for path, file in files.items()}
    if there := [path for path in texts if Path(path).exists()]:
        sys.exit(f"{' and '.join(there)} exist already. Choose another name, or remove them first.")
    if re.search(rf"\b{words['CLASS']}\b", "".join(texts.values())):
        sys.exit(f"The new file uses another {words['CLASS']}. Choose a name such as my_{name}.")
    for path, text in texts.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(filled(text, words))
        print(f"wrote  {path}")
    tested = "tests/test_config.py" if kind == "experiment" else [*texts][-1]
    print(f"run    python train.py {group}={name}\ntest   pytest {tested}")


def choice(group: str, *wanted: str) -> str:
    """Return a file of ``conf/<group>`` for an experiment: the first that exists, or another."""
    names = sorted(path.stem for path in Path("conf", group).glob("[!_]*.yaml"))
    if not names:
        sys.exit(f"There is no conf/{group}/*.yaml to choose. Write one: new.py {group} mine")
    return next((name for name in wanted if name in names), names[0])


def filled(text: str, words: dict[str, str]) -> str:
    """Fill a template's text, and put its imports into the order of their modules."""
    text = re.sub(rf"(?<![A-Z])({'|'.join(words)})(?![A-Z])", lambda match: words[match[0]], text)
    own = rf"(?m)(?:^from (?:harness|{words['PACKAGE']})\b.*\n)+"
    return re.sub(own, lambda match: "".join(sorted(match[0].splitlines(keepends=True))), text)


if __name__ == "__main__":
    main()
