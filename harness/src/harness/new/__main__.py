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
import json
import keyword
import re
import sys
from pathlib import Path

import polars as pl

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
    group = "model" if kind == "module" else kind  # of conf/
    run = f"python train.py {group}={name}"
    if arguments.csv:
        if kind != "data":
            sys.exit(f"--csv belongs to data, not to {kind}.")
        kind = "csv"
        words |= words_of_table(Path(arguments.csv))
        run += f" model={words['MODEL']}"
    files = templates(kind, group, name, packages[0])
    texts = {path: (TEMPLATES / file).read_text() for path, file in files.items()}
    if there := [path for path in texts if Path(path).exists()]:
        sys.exit(f"{' and '.join(there)} exist already. Choose another name, or remove them first.")
    if kind != "csv" and re.search(rf"\b{words['CLASS']}\b", "".join(texts.values())):
        sys.exit(f"The new file uses another {words['CLASS']}. Choose a name such as my_{name}.")
    for path, text in texts.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(filled(text, words))
        print(f"wrote  {path}")
    tested = "tests/test_config.py" if kind == "experiment" else [*texts][-1]
    print(f"run    {run}\ntest   pytest {tested}")


def templates(kind: str, group: str, name: str, package: str) -> dict[str, str]:
    """Return the template of each file to write: the YAML, the code and its test."""
    folder = "data" if group == "data" else "models"
    files = {f"conf/{group}/{name}.yaml": f"{kind}.yaml"}
    if kind in ("model", "module", "data"):
        files[f"src/{package}/{folder}/{name}.py"] = f"{kind}.py.txt"
    if kind != "experiment":
        files[f"tests/{folder}/test_{name}.py"] = f"test_{kind}.py.txt"
    return files


def words_of_table(path: Path) -> dict[str, str]:
    """Fill the template of a table by its columns, and print what its last one holds."""
    try:
        table = pl.read_csv(path, infer_schema=False)
    except (OSError, pl.exceptions.PolarsError) as error:
        sys.exit(f"--csv {path} cannot be read: {error}.")
    columns = [name.strip() for name in table.columns]
    targets = table.to_series(-1).str.strip_chars().replace("", None).drop_nulls()
    if len(columns) < 2 or targets.is_empty():
        sys.exit(f"--csv {path} needs two named columns or more, and values in the last one.")
    numbers = targets.cast(pl.Float64, strict=False)
    are_whole = numbers.null_count() == 0 and (numbers == numbers.floor()).all()
    are_few = targets.n_unique() <= min(MOST_CLASSES, table.height / 3)
    are_classes = numbers.null_count() == len(numbers) or (are_whole and are_few)
    print(f"target {columns[-1]}: {'classes' if are_classes else 'numbers'}")
    return {
        "PATH": json.dumps(str(path)),
        "TARGET": json.dumps(columns[-1]),
        "COLUMNS": ", ".join(columns),
        "TRUTH": json.dumps(are_classes),
        "MODEL": "table_mlp" if are_classes else "table_regressor",
    }


def filled(text: str, words: dict[str, str]) -> str:
    """Fill a template's text, and put its imports into the order of their modules."""
    text = re.sub(rf"(?<![A-Z])({'|'.join(words)})(?![A-Z])", lambda match: words[match[0]], text)
    own = rf"(?m)(?:^from (?:harness|{words['PACKAGE']})\b.*\n)+"
    return re.sub(own, lambda match: "".join(sorted(match[0].splitlines(keepends=True))), text)


if __name__ == "__main__":
    main()
