"""Write the page of all config keys: type, default and meaning of each.

The config files are read by ``config_keys``.
"""

import re

from template.site.config_keys import ConfigFile, Files, meaning, read_all, same_keys
from template.site.key_types import RULES, type_of
from template.site.markdown import ROOT, fenced, inline, table

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


def write() -> str:
    """Return the page."""
    files = read_all()
    parts = []
    for command in ("train", "evaluate", "predict"):
        parts += section(files, files["", command], f"## Keys of `{command}.py`")
    for group, text in GROUPS.items():
        parts.append(f"## `{group}`\n\n{text}\n")
        chosen = [file for file in files.values() if file.group == group]
        for file in sorted(chosen, key=lambda one: (one.path.stem[0] != "_", one.path.stem)):
            parts += section(files, file, f"### `{file.name}`")
    return "\n".join([*parts, rules()])


def section(files: Files, file: ConfigFile, heading: str) -> list[str]:
    """Return the heading of a file, its description, its examples and the table of its keys."""
    end = "" if file.text.endswith((".", ":", "?")) else "."
    parts = [f"{heading}\n", f"{inline(file.text)}{end}\n"]
    if file.examples:
        parts.append(fenced(file.examples, "bash"))
    bases = ", ".join(f"`{files[base].name}`" for base in file.bases if base in files)
    facts = [f"It builds `{file.target}`."] if file.target else []
    facts += [f"It takes the keys of {bases} as well."] if file.group and bases else []
    facts.append(f"The file is `{file.path.relative_to(ROOT)}`.")
    parts.append(" ".join(facts) + "\n")
    rows = []
    for key in file.keys:
        same = same_keys(files, file, key)
        if not (means := meaning(file, key, same)):
            raise SystemExit(
                f"{file.path}: {key.path} has no meaning. Write a comment behind the key: "
                f"{key.name}: {key.default}  # <what it means>"
            )
        rows.append([f"`{key.path}`", type_of(key, same), f"`{key.default}`", inline(means)])
    return [*parts, table(["key", "type", "default", "meaning"], rows)] if rows else parts


def rules() -> str:
    """Return the section of the keys of ``conf/rules.yaml``, which hold lists."""
    text = (ROOT / "conf" / "rules.yaml").read_text() + RULES.read_text()
    keys = dict(re.findall(r"(?m)^(\w+):(?:.*  # (.*))?", text))
    if missing := [key for key, comment in keys.items() if not comment]:
        raise SystemExit(f"{RULES}: {missing[0]} has no meaning. Write a comment behind it.")
    rows = [[f"`{key}`", inline(comment)] for key, comment in keys.items()]
    return f"## `conf/rules.yaml`\n\n{RULES_TEXT}\n{table(['key', 'meaning'], rows)}"
