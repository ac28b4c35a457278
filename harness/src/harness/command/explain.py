"""What Hydra and OmegaConf refuse, in words that say what to type instead."""

import re
from collections.abc import Iterable
from pathlib import Path

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.command import config_files
from harness.command.config_files import groups
from harness.command.hydra_calls import hydra_compose
from harness.errors import UserError
from harness.names import did_you_mean

# Settings of earlier Lightning versions and of the scripts of that time.
OLD_NAMES = {
    "gpus": "strategy=gpu for one GPU, or strategy=ddp trainer.devices=<number of GPUs>",
    "num_gpus": "trainer.devices=<number of GPUs>",
    "distributed_backend": "strategy=<ddp, ddp_spawn, ...>",
    "accelerator": "strategy=cpu or strategy=gpu",
}


def explain(error: Exception, config_name: str, overrides: list[str], conf: Path) -> str:
    """Say in one or two lines what Hydra or OmegaConf refused."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        name, _, choice = str(error.missing_cfg_file).rpartition("/")
        return unknown_choice(name, choice, conf, error.options)
    if isinstance(error.__cause__, (ConfigKeyError, ConfigAttributeError)):
        return _unknown_key(str(error.__cause__.full_key), config_name, overrides, conf)
    if isinstance(error, OverrideParseException):
        key, equals, value = str(error.override).partition("=")
        if not equals:
            return f"{key!r} is not of the form key=value."
        if split := _split_by_shell(str(error.override), overrides):
            return split
        quoted = value.replace('"', "")
        return (
            f"The value of {key} has characters with a meaning of their own.\n"
            f"Write it in two pairs of quotes: '{key}=\"{quoted}\"'."
        )
    text = str(error)
    if text.startswith("Config group override must be"):  # which one? a number or null
        for key, _, value in (word.partition("=") for word in overrides):
            if key in groups(conf) and not isinstance(yaml.safe_load(value), (str, list)):
                return unknown_choice(key, value, conf)
    if group := re.match(r"Multiple values for (\w+)\.", text):
        return (
            f"{group[1]} is chosen already: write {group[1]}=<choice>, without a plus sign; in a "
            f"YAML file - override /{group[1]}: <choice>."
        )
    if found := re.search(r"Interpolation key '(from_data\.\w+)' not found", text):
        return f"What the data teaches is no interpolation: write {found[1]} without ${{}}."
    if found := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, value = found.groups()
        return (
            f"{key}={value} is a run for each of them, which -m asks for: -m {key}={value}\n"
            f"One run with all of them is {key}=[{value}]."
        )
    if found := re.match(r"Could not override '(\w+)/(\w+)'", text):
        return (
            f"{found[1]}/{found[2]}: the chosen {found[1]} has no choice of a {found[2]}.\n"
            f"Its YAML offers one with the line - {found[2]}: <choice> in its defaults."
        )
    if found := re.match(r"In '?([\w/]+)'?: Could not override '\w+@\w+\.", text):
        return f"{found[1]}.yaml: its first line must be # @package _global_."
    if found := re.match(r"In '?([\w/]+)'?: Override .* before '(?:\w+/)*(\w+)\S*: (\w+)'", text):
        return f"{found[1]}.yaml: write - override /{found[2]}: {found[3]}"
    lines = [line for line in text.splitlines() if line.strip()]
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {lines[0]}"
    return "\n".join(lines[:2])


def _split_by_shell(override: str, overrides: list[str]) -> str | None:
    """Say how to write a list with spaces, of which the shell makes several arguments."""
    if _is_closed(override) or override not in overrides:
        return None
    rest = overrides[overrides.index(override) :]
    for end in range(2, len(rest) + 1):
        if _is_closed(whole := " ".join(rest[:end])):
            return (
                f"The shell splits {whole} at the space.\n"
                f"Write it without spaces, {''.join(rest[:end])}, or in quotes, '{whole}'."
            )
    return f"{override}: a bracket is not closed."


def _is_closed(text: str) -> bool:
    return all(text.count(opening) == text.count(closing) for opening, closing in ("[]", "{}"))


def refuse_other_meanings(overrides: list[str]) -> None:
    """Refuse words that elsewhere mean what they do not mean here.

    With ``gpus=2`` of Lightning 1 Hydra would look for a file. No run is a job of Hydra's.

    Raises:
        UserError: with what to type instead.
    """
    for word in overrides:
        if re.fullmatch(r"\+?gpus=[-\d,\[\]]+", word):
            raise UserError(old_name("gpus"))
        key = word.lstrip("+~").partition("=")[0]
        if key.startswith(("hydra.run.", "hydra.sweep.")):
            raise UserError(f"{key} has no use here: give output_dir=<folder> and name=<name>.")
        if re.match(r"hydra[./](launcher|sweeper|callbacks|mode)", key):
            raise UserError(_of_hydras_own(word))
        if re.match(r"hydra[./]", key) and key != "hydra.searchpath":
            raise UserError(
                f"{word} has no use here, where no run is a job of Hydra's. Leave it out."
            )


def refuse_hydras_own(settings: DictConfig) -> None:
    """Refuse what a YAML file wants Hydra to do, which composes here and does nothing else.

    Raises:
        UserError: with what there is instead.
    """
    found = {
        "callbacks": bool(settings.callbacks),
        "launcher": not settings.launcher.get("_target_", "").endswith(".BasicLauncher"),
        "sweeper": not settings.sweeper.get("_target_", "").endswith(".BasicSweeper")
        or bool(settings.sweeper.get("params")),
        "mode": settings.mode == RunMode.MULTIRUN,
    }
    for key, is_asked in found.items():
        if is_asked:
            raise UserError(_of_hydras_own(f"hydra.{key} in a YAML file"))


def _of_hydras_own(what: str) -> str:
    if "callbacks" in what:
        return f"{what} has no use here: write a callback of Lightning, and add it to callbacks."
    return (
        f"{what}: sweeps are run by the harness from the command line: python train.py -m <words>\n"
        "Under Slurm an array of jobs is one: see harness/docs/cluster.md."
    )


def unknown_choice(
    group: str, choice: str, conf: Path, options: Iterable[str] | None = None
) -> str:
    """Name the files that there are, in place of one that there is not."""
    # Hydra tells no options of a group that takes a list.
    options = options or config_files.choices(conf, group)
    options = [option for option in options if not option.startswith("_")]
    if not group:
        return f"There is no conf/{choice}.yaml."
    if f"{group}={choice}" == "strategy=ddp_cpu":
        return "strategy=ddp_cpu is of Lightning 1. Use strategy=ddp trainer.accelerator=cpu."
    return (
        f"{group}={choice}: there is no conf/{group}/{choice}.yaml."
        f"{did_you_mean(choice, options, prefix=f'{group}=')}\n"
        f"Choices: {', '.join(options)}."
    )


def _unknown_key(key: str, config_name: str, overrides: list[str], conf: Path) -> str:
    if key.rpartition(".")[2] in OLD_NAMES:
        return old_name(key)
    group, _, name = key.partition(".")
    if name and name.partition(".")[0] in config_files.choices(conf, group):
        return f"There is no key {key} without {group}={name.partition('.')[0]}: add that."
    if config_name != "train" and key in ("data", "model"):
        return f"{key}={{...}}: the {key} is that of the checkpoint's run. Leave it out."
    hint = nearest(key, config_name, overrides, conf)
    if any(re.match("resume=(?!auto|null)", word) for word in overrides):
        return (
            f"There is no key {key} in the default config.{hint}\n"
            "A run that goes on has its settings: leave it out, or add the choice that has the key."
        )
    return f"There is no key {key}.{hint}\nTo add a new one, write +{key}=<value>."


def nearest(key: str, config_name: str, overrides: list[str], conf: Path) -> str:
    """Ask whether a key that is not there should be one that is."""
    known = known_keys(config_name, overrides, conf)
    keys = [name for name in known if name != key]
    leaf = key.rpartition(".")[2]
    if inner := [name for name in groups(conf) if name.endswith(f"/{key}")]:
        return f" Did you mean {inner[0]}=<choice>?"
    same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
    if same_leaf:  # lr means model.optimizer.lr, however far the two are apart as text
        return f" Did you mean {same_leaf[0]}?"
    return did_you_mean(key, [*keys, *groups(conf)])


def old_name(key: str) -> str:
    """Name today's setting instead of one of Lightning 1."""
    return f"{key} is a setting of Lightning 1. Use {OLD_NAMES[key.rpartition('.')[2]]}."


def known_keys(config_name: str, overrides: list[str], conf: Path) -> list[str]:
    """All keys of the composed config, with the choices of groups that the command made."""
    chosen = {*groups(conf), "hydra.searchpath"}
    choices = [
        text
        for text in overrides
        if text.partition("=")[0] in chosen and "," not in text and "={" not in text
    ]
    return list(_keys(hydra_compose(config_name, choices, conf)))


def _keys(node: DictConfig, prefix: str = "") -> Iterable[str]:
    for key, child in node.items_ex(resolve=False):
        yield f"{prefix}{key!s}"
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{prefix}{key!s}.")
