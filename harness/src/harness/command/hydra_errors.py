"""Turn errors of Hydra, OmegaConf and PyYAML into short messages with what to type instead.

In: an exception of these packages. Out: a ``UserError`` that suggests a similar key or choice, or
that has the exception's own first lines. ``compose`` and ``check`` use it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.command.config_files import choices, groups, hydra_compose
from harness.errors import UserError
from harness.keys import last_part
from harness.suggestions import SYNONYMS, suggest

# Overrides of Lightning 1 and of scripts from its time, as patterns, and their replacements.
OLD_KEYS = {
    r"(trainer\.)?(num_)?gpus=[-\[\d].*": (
        "strategy=gpu for one GPU, or strategy=ddp trainer.devices=<number of GPUs>"
    ),
    r"(trainer\.)?distributed_backend=.*": "strategy=<ddp, dp, ...>",
    r"accelerator=.*": "strategy=cpu or strategy=gpu",
    r"strategy=ddp_cpu": "strategy=ddp trainer.accelerator=cpu",
}
NO_PACKAGE = " The first line of such a file must be # @package _global_"


@contextmanager
def explaining_errors(task: str, overrides: Sequence[str], conf: Path) -> Iterator[None]:
    """Turn an error of Hydra, OmegaConf or PyYAML in the block into a ``UserError``."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(_message(error, task, overrides, conf)) from error
    except yaml.YAMLError as error:  # its text has the file and the line
        raise UserError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise UserError(
            "The defaults of a YAML file include that file itself, directly or through another."
        ) from error


def _message(error: Exception, task: str, overrides: Sequence[str], conf: Path) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return _unknown_choice(group, choice, conf, error.options)
    if isinstance(error.__cause__, (ConfigKeyError, ConfigAttributeError)):
        return _unknown_key(str(error.__cause__.full_key), task, overrides, conf)
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        return (
            f"{error.override!r} is not of the form key=value, without spaces, brackets closed.\n"
            f"Other signs need two pairs of quotes: '{key}=\"{value}\"'."
        )
    if match := re.search(r"In '\w+/\w+': Could not override '\w+@\w+\.\w+'\.", str(error)):
        return match[0] + NO_PACKAGE
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:  # OmegaConf refused a value: Hydra's error has no text, but its cause has
        cause = error.__cause__
        return (
            _message(cause, task, overrides, conf) if isinstance(cause, Exception) else repr(error)
        )
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {lines[0]}"
    return "\n".join(lines[:2])


def _unknown_choice(group: str, choice: str, conf: Path, options: Iterable[str] | None) -> str:
    """Return the message for a choice that does not exist, with the files of its group."""
    if not group:
        return f"There is no conf/{choice}.yaml."
    # Hydra has no options for a group that takes a list. Files that begin with _ are no choices.
    names = [name for name in options or choices(conf, group) if not name.startswith("_")]
    return (
        f"{group}={choice}: there is no conf/{group}/{choice}.yaml."
        f"{suggest(choice, names, prefix=f'{group}=')}\nChoices: {', '.join(names)}."
    )


def _unknown_key(key: str, task: str, overrides: Sequence[str], conf: Path) -> str:
    """Return the message for a key that does not exist, with a similar key or a choice."""
    group, _, name = key.partition(".")
    if name and name.partition(".")[0] in choices(conf, group):
        return f"There is no key {key} without {group}={name.partition('.')[0]}: add that."
    pairs = [override.partition("=") for override in overrides]
    value = next((new_value for name, _, new_value in pairs if name == key), "<value>")
    matching = [name for name in groups(conf) if value in choices(conf, name)]
    if hint := suggest(key, matching):
        return f"There is no key {key}.{hint.replace('?', f'={value}?')}"
    by_group = {*groups(conf), "hydra.searchpath"}  # these choices add keys
    chosen = [o for o in overrides if o.partition("=")[0] in by_group and not re.search(",|={", o)]
    hint = suggest_key(key, hydra_compose(task, chosen, conf), conf)
    return f"There is no key {key}.{hint}\nTo add a new one, write +{key}={value}."


def suggest_key(key: str, cfg: DictConfig, conf: Path) -> str:
    """Suggest a key of a config: a synonym, or else a similar key, first with the same parent."""
    all_groups = groups(conf)
    if inner := [name for name in all_groups if name.endswith(f"/{key}")]:
        return f" Did you mean {inner[0]}=<choice>?"
    keys = [name for name in _keys_below(cfg) if name != key and not name.startswith(f"{key}.")]
    parent, _, last = key.rpartition(".")
    siblings = [name for name in keys if parent and name.rpartition(".")[0] == parent]
    for name in (*siblings, *keys):
        if last_part(name) == SYNONYMS.get(last, last):
            return f" Did you mean {name}?"
    return suggest(key, siblings) or suggest(key, [*keys, *all_groups])


def _keys_below(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key, child in node.items_ex(resolve=False):
        yield f"{prefix}{key!s}"
        if isinstance(child, DictConfig):
            yield from _keys_below(child, f"{prefix}{key!s}.")
