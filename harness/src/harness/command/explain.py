"""Mistakes in words and in YAML files, in one or two lines that say what to type instead.

In: what Hydra, OmegaConf or PyYAML refuse. Out: a ``UserError`` with the nearest key or choice, or
with their own first lines where these say enough.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.command.config_files import choices, files, groups, hydra_compose
from harness.errors import UserError
from harness.names import did_you_mean, shown

# Settings of earlier Lightning versions and of the scripts of that time.
OLD_NAMES = {
    "gpus": "strategy=gpu for one GPU, or strategy=ddp trainer.devices=<number of GPUs>",
    "num_gpus": "trainer.devices=<number of GPUs>",
    "distributed_backend": "strategy=<ddp, ddp_spawn, ...>",
    "accelerator": "strategy=cpu or strategy=gpu",
}
MEANINGS = {"learning_rate": "lr", "epochs": "max_epochs", "steps": "max_steps"}
SAID = {  # what Hydra says, and what is said instead
    r"Multiple values for (\w+)\.": (
        "{0} is chosen already: write {0}=<choice>, without a plus sign; in a YAML file "
        "- override /{0}: <choice>."
    ),
    r"Interpolation key '(from_data\.\w+)' not found": (
        "What the data teaches is no interpolation: write {0} without ${{}}."
    ),
    r"Ambiguous value for argument '([^=]+)=(.*)'": (
        "{0}={1} is a run for each of them, which -m asks for: -m {0}={1}\n"
        "One run with all of them is {0}=[{1}]."
    ),
    r"In '?([\w/]+)'?: Override .* before '(?:\w+/)*(\w+)\S*: (\w+)'": (
        "{0}.yaml: write - override /{1}: {2}"
    ),
}
PACKAGE = re.compile(r"^#\s*@package\s+_global_", re.MULTILINE)
NEEDED = (
    "data",
    "model",
    "trainer",
    "gpus",
    "callbacks",
    "logger",
)  # nothing runs without their keys


@contextmanager
def explained(task: str, words: Sequence[str], conf: Path) -> Iterator[None]:
    """Turn what Hydra, OmegaConf or PyYAML refuse of a command into a ``UserError``."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(explain(error, task, words, conf)) from error
    except yaml.YAMLError as error:
        raise UserError(explain_syntax(error)) from error
    except RecursionError as error:
        raise UserError(
            "The defaults of a YAML file include that file itself, directly or through another."
        ) from error


def explain(error: Exception, task: str, words: Sequence[str], conf: Path) -> str:
    """Say in one or two lines what Hydra or OmegaConf refused."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return unknown_choice(group, choice, conf, error.options)
    if isinstance(error.__cause__, (ConfigKeyError, ConfigAttributeError)):
        return unknown_key(str(error.__cause__.full_key), task, words, conf)
    if isinstance(error, OverrideParseException):
        return unreadable_word(str(error.override))
    text = str(error)
    for pattern, said in SAID.items():
        if match := re.search(pattern, text):
            return said.format(*match.groups())
    lines = [line for line in text.splitlines() if line.strip()]
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {lines[0]}"
    return "\n".join(lines[:2])


def explain_syntax(error: yaml.YAMLError) -> str:
    """Say where a file is no YAML, in PyYAML's words, and show the line."""
    is_open = re.search("while parsing a flow|while scanning a quoted", str(error))
    mark = getattr(error, "context_mark" if is_open else "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    context = f"{getattr(error, 'context', '')}, " if is_open else ""
    path = Path(mark.name)
    lines = path.read_text().splitlines() if path.is_file() else []
    said = f"{shown(path)}:{mark.line + 1}: {context}{getattr(error, 'problem', error)}."
    return "\n".join([said, *lines[mark.line : mark.line + 1]])


def unknown_choice(group: str, choice: str, conf: Path, options: Iterable[str] | None) -> str:
    """Name the files of a group, in place of one that does not exist."""
    if not group:
        return f"There is no conf/{choice}.yaml."
    if f"{group}={choice}" == "strategy=ddp_cpu":
        return "strategy=ddp_cpu is of Lightning 1. Use strategy=ddp trainer.accelerator=cpu."
    # Hydra gives no options for a group that takes a list; files that begin with _ are parts.
    names = [name for name in options or choices(conf, group) if not name.startswith("_")]
    return (
        f"{group}={choice}: there is no conf/{group}/{choice}.yaml."
        f"{did_you_mean(choice, names, prefix=f'{group}=')}\nChoices: {', '.join(names)}."
    )


def unreadable_word(word: str) -> str:
    """Say how to write a word that Hydra cannot parse."""
    key, equals, value = word.partition("=")
    if not equals:
        return f"{word!r} is not of the form key=value."
    if any(value.count(opening) > value.count(closing) for opening, closing in ("[]", "{}")):
        return (
            f"{word}: a bracket is not closed. The shell splits words at spaces:\n"
            f"write the value without spaces, or the word in quotes, as in '{word} ...]'."
        )
    quoted = value.replace('"', "")
    return (
        f"The value of {key} has characters with a meaning of their own.\n"
        f"Write it in two pairs of quotes: '{key}=\"{quoted}\"'."
    )


def unknown_key(key: str, task: str, words: Sequence[str], conf: Path) -> str:
    """Name the nearest key, or the choice that brings one that does not exist."""
    if key.rpartition(".")[2] in OLD_NAMES:
        return old_name(key)
    group, _, name = key.partition(".")
    if name and name.partition(".")[0] in choices(conf, group):
        return f"There is no key {key} without {group}={name.partition('.')[0]}: add that."
    if task != "train" and key in ("data", "model"):
        return f"{key}={{...}}: the {key} is that of the checkpoint's run. Leave it out."
    hint = nearest(key, task, words, conf)
    if any(re.match("resume=(?!auto|null)", word) for word in words):
        return (
            f"There is no key {key} in the default config.{hint}\n"
            "A run that goes on has its settings: leave it out, or add the choice that has the key."
        )
    return f"There is no key {key}.{hint}\nTo add a new one, write +{key}=<value>."


def nearest(key: str, task: str, words: Sequence[str], conf: Path) -> str:
    """Suggest an existing key: of the same parent first, then of the same name or meaning."""
    all_groups = groups(conf)
    chosen = [  # with the choices of the command, as these bring keys
        word
        for word in words
        if word.partition("=")[0] in {*all_groups, "hydra.searchpath"}
        and not re.search(",|={", word)
    ]
    keys = [name for name in _keys_below(hydra_compose(task, chosen, conf)) if name != key]
    if inner := [name for name in all_groups if name.endswith(f"/{key}")]:
        return f" Did you mean {inner[0]}=<choice>?"
    parent, _, leaf = key.rpartition(".")
    siblings = [name for name in keys if parent and name.rpartition(".")[0] == parent]
    for name in (*siblings, *keys):
        if name.rpartition(".")[2] == MEANINGS.get(leaf, leaf):
            return f" Did you mean {name}?"
    return did_you_mean(key, siblings) or did_you_mean(key, [*keys, *all_groups])


def old_name(key: str) -> str:
    """Name today's setting in place of one of Lightning 1."""
    return f"{key} is a setting of Lightning 1. Use {OLD_NAMES[key.rpartition('.')[2]]}."


def _keys_below(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key, child in node.items_ex(resolve=False):
        yield f"{prefix}{key!s}"
        if isinstance(child, DictConfig):
            yield from _keys_below(child, f"{prefix}{key!s}.")


def check_experiments(words: Sequence[str], conf: Path) -> None:
    """Refuse keys of an experiment's file that nothing reads: Hydra merges whatever it holds.

    Raises:
        UserError: with the file, the line and the nearest key.
    """
    default = yaml.safe_load((conf / "train.yaml").read_text())
    names = {*default, *groups(conf), "defaults"}
    without = [word for word in words if not word.lstrip("+").startswith("experiment=")]
    for path in _experiments(words, conf):
        with path.open() as file:
            own = yaml.safe_load(file) or {}
        if not PACKAGE.search(path.read_text()):
            raise UserError(f"{shown(path)}: its first line must be # @package _global_")
        if own.get("objective") is not None and "mode" not in own:
            raise UserError(
                f"{_place(path, 'objective')}: objective without its mode, which a model may have "
                "set to the other one.\nAdd mode: min or mode: max below it."
            )
        for name, value in own.items():
            known = default.get(name)
            is_nested = isinstance(known, dict) or name in NEEDED
            may_be_null = name == "data" or name not in NEEDED
            if is_nested and not (isinstance(value, dict) or (value is None and may_be_null)):
                raise UserError(
                    f"{_place(path, name)}: there are no keys below {name}.\n"
                    "Indent them, and write each as key: value, with a space after the colon."
                )
            unread = [] if name in names or _is_interpolated(name, conf) else [name]
            if isinstance(known, dict):
                unread += [f"{name}.{key}" for key in value or () if key not in known]
            for key in unread:
                hint = nearest(key, "train", without, conf)
                raise UserError(f"{_place(path, key)}: nothing reads {key}.{hint}")


def _experiments(words: Sequence[str], conf: Path) -> Iterator[Path]:
    """The files that ``experiment=`` and ``debug=`` choose, also of a further folder."""
    places = [Path(place) for place in re.findall(r"file://([^,\]\s]+)", " ".join(words))]
    for word in words:
        group, _, value = word.lstrip("+").partition("=")
        for choice in re.findall(r"[^\s,\[\]'\"]+", value):
            paths = [place / group / f"{choice}.yaml" for place in (*places, conf)]
            if group in ("experiment", "debug"):
                yield from [path for path in paths if path.is_file()][:1]


def _is_interpolated(name: str, conf: Path) -> bool:
    """Whether a config file fills in ``${name}``."""
    return any(re.search(rf"\$\{{{re.escape(name)}\b", path.read_text()) for path in files(conf))


def _place(path: Path, key: str) -> str:
    """The file, and the first line that has the last part of a key."""
    leaf = re.escape(key.rpartition(".")[2])
    lines = path.read_text().splitlines()
    number = next((i for i, line in enumerate(lines, 1) if re.match(rf"\W*{leaf}\b", line)), 1)
    return f"{shown(path)}:{number}"
