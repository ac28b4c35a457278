"""Write the page of all config keys: type, default and meaning of each.

In: the config files, as ``yaml_keys`` reads them. Out: Markdown.
"""

from collections.abc import Iterator

from template.site.key_types import RULES, type_of
from template.site.markdown import cell, code, table
from template.site.yaml_keys import (
    ROOT,
    ConfigFile,
    Key,
    chain,
    find,
    meaning,
    read,
    read_all,
    same_path,
)

HEAD = """# Config keys

This page lists every key of every config file: its type, its default and its meaning.

- A command sets a key by its path: `python train.py trainer.max_epochs=5`.
- A command chooses a file of a group by its name: `python train.py model=mlp`.
- `python train.py --cfg job` prints every key of a command with its value.
- `???` means that the command must set the key. `${seed}` is the value of the key `seed`.
- `from_data.num_classes` is a value that the data set infers.

A file whose name starts with `_` holds the keys that several files share. Your own files in
`conf/` have the same form, and you describe your keys there by comments.
"""
# The order of the groups on the page, and what each chooses.
GROUPS = {
    "data": "The data set, its splits and its loaders.",
    "model": "The LightningModule and its network.",
    "model/optimizer": "The optimizer.",
    "model/scheduler": "The schedule of the learning rate.",
    "trainer": "The arguments of Lightning's Trainer.",
    "strategy": "The devices, and how they share the work. These files set keys of the Trainer.",
    "gpus": "Which GPUs a run takes.",
    "callbacks": "Further callbacks. Several can be chosen: `callbacks=[early_stopping,ema]`.",
    "watch": "The callbacks that monitor each training.",
    "logger": "The loggers, which get the logged values.",
    "sweep": "How `-m` runs many jobs. A run does not have these keys.",
    "experiment": "A choice of the groups above with its settings.",
    "debug": "Settings to find a mistake. They are applied last.",
}
RULES_TEXT = """These rules check a command before it starts. Your rules are added to the rules of
the library, which are in `harness/src/harness/command/default_rules.yaml`.
"""
COMMANDS = {"train": "train.py", "evaluate": "evaluate.py", "predict": "predict.py"}


def write() -> str:
    """Return the page."""
    files = read_all()
    parts = [HEAD]
    for choice, program in COMMANDS.items():
        file = find(files, "", choice)
        assert file is not None
        parts += section(files, file, f"## Keys of `{program}`", "")
    for group, text in GROUPS.items():
        chosen = [file for file in files if file.group == group]
        parts.append(f"## `{group}`\n\n{text}\n")
        for file in sorted(chosen, key=lambda one: (not one.choice.startswith("_"), one.choice)):
            is_shared = file.choice.startswith("_")
            name = f"`{group}/{file.choice}.yaml`" if is_shared else f"`{group}={file.choice}`"
            parts += section(files, file, f"### {name}", group)
    parts.append(rules())
    return "\n".join(parts)


def rules() -> str:
    """Return the section of the keys of ``conf/rules.yaml``, which hold lists."""
    files = [read(path, "") for path in (ROOT / "conf" / "rules.yaml", RULES)]
    keys = {key.path: key.comment for file in files for key in file.keys if "." not in key.path}
    if missing := [key for key, comment in keys.items() if not comment]:
        raise SystemExit(f"{RULES}: {missing[0]} has no meaning. Write a comment behind it.")
    rows = [[code(key), cell(comment)] for key, comment in keys.items()]
    return f"## `conf/rules.yaml`\n\n{RULES_TEXT}\n{table(['key', 'meaning'], rows)}"


def section(files: list[ConfigFile], file: ConfigFile, heading: str, group: str) -> Iterator[str]:
    """Yield the heading of a file, its description, its examples and the table of its keys."""
    yield f"{heading}\n\n{sentence(cell(file.text))}\n" if file.text else f"{heading}\n"
    if file.examples:
        yield "```bash\n" + "\n".join(file.examples) + "\n```\n"
    facts = []
    if file.target:
        facts.append(f"It builds `{file.target}`.")
    shared = [one for one in file.bases if find(files, *one)]
    if group and shared:
        facts.append(f"It takes the keys of {', '.join(name_of(*one) for one in shared)} as well.")
    facts.append(f"The file is `{file.path.as_posix()}`.")
    yield " ".join(facts) + "\n"
    rows = [row(files, file, key) for key in file.set_keys()]
    if rows:
        yield table(["key", "type", "default", "meaning"], rows)


def name_of(group: str, choice: str) -> str:
    """Return the name of a file of a group, as code."""
    return f"`{group}/{choice}.yaml`" if choice.startswith("_") else f"`{group}={choice}`"


def row(files: list[ConfigFile], file: ConfigFile, key: Key) -> list[str]:
    """Return the cells of a key.

    Raises:
        SystemExit: the key has no meaning or no type.
    """
    means = meaning(files, file, key)
    if not means:
        raise SystemExit(
            f"{file.path}: {key.path} has no meaning. Write a comment behind the key: "
            f"{key.name}: {key.default}  # <what it means>"
        )
    kind = type_of(key, [*same_path(chain(files, file), key), *same_path(files, key)])
    if not kind:
        raise SystemExit(
            f"{file.path}: {key.path} has no type. Annotate the argument, or add the key to "
            "takes in harness/src/harness/command/default_rules.yaml."
        )
    return [code(key.path), cell(kind), code(key.default), cell(means)]


def sentence(text: str) -> str:
    """Return a text that ends with a full stop."""
    return text if text.endswith((".", ":", "?")) else f"{text}."
