"""Where a command's config files lie: in the owner's folder, and then in the harness's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

import harness
from harness.allowed import RULES, owners_rules
from harness.errors import UserError
from harness.names import did_you_mean, flat
from harness.places import shown

OWN = Path(harness.__path__[0], "conf").resolve()
DEFAULT_RULES = Path(harness.__path__[0], "command", "default_rules.yaml")


class HarnessConfigFiles(SearchPathPlugin):
    """Let Hydra find the harness's config files behind the owner's, whose files of a name win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder, as Hydra asks every plugin of this kind."""
        search_path.append("harness", f"file://{OWN}")


def register() -> None:
    """Make Hydra search the harness's folder, in this process."""
    Plugins.instance().register(HarnessConfigFiles)


def folders(conf: Path) -> list[Path]:
    """The folders in the order in which they are searched."""
    return [conf, OWN]


def groups(conf: Path) -> set[str]:
    """The choices that a command has: the folders of config files, also inside of one another."""
    return {
        path.relative_to(folder).as_posix()
        for folder in folders(conf)
        for path in folder.rglob("*")
        if path.is_dir()
    }


def choices(conf: Path, group: str) -> list[str]:
    """The names of a group's files."""
    return sorted(
        {path.stem for folder in folders(conf) for path in folder.glob(f"{group}/*.yaml")}
    )


def files(conf: Path) -> Iterator[Path]:
    """Every config file."""
    for folder in folders(conf):
        yield from folder.rglob("*.yaml")


def rules(conf: Path) -> dict[str, Any]:
    """The harness's rules with those of the owner's ``rules.yaml``, whose lists are added.

    Raises:
        UserError: if a rule has no meaning.
    """
    found: dict[str, Any] = yaml.safe_load(DEFAULT_RULES.read_text(encoding="utf-8"))
    place = shown(conf / RULES)
    for name, value in owners_rules(conf).items():
        if name == "allowed":
            continue  # harness.allowed has read them
        if name not in found:
            hint = did_you_mean(str(name), list(found))
            raise UserError(f"{place}: there is no rule {name}.{hint}")
        found[name] = _added(found[name], value, f"{place}: {name}")
    for name, kind, what in (("whole_numbers", int, "a whole number"), ("choices", list, "a list")):
        for key, value in flat(found[name]).items():
            if not isinstance(value, kind) or isinstance(value, bool) or value == []:
                raise UserError(f"{place}: {name}: {key}: {value} must be {what}.")
    return found


def _added(default: Any, own: Any, place: str) -> Any:
    """One value on top of another: lists follow each other, mappings are merged."""
    if isinstance(default, list) and isinstance(own, list):
        return [*default, *own]
    if isinstance(default, dict) and isinstance(own, dict):
        both = default.keys() & own.keys()
        added = {key: _added(default[key], own[key], f"{place}.{key}") for key in both}
        return default | own | added
    if isinstance(default, list | dict):
        raise UserError(
            f"{place}: {own} must be {'a list' if isinstance(default, list) else 'keys'}."
        )
    return own
