"""The config files of a command, from the user's folder and from this library.

In: the folder ``conf`` and overrides. Out: the config that Hydra composes, the config groups and
their files, and the rules for checking a command. A user's file replaces the library's file of the
same name.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from harness.compat.hydra_versions import config_folder, register_resolver
from harness.devices import num_gpus
from harness.display import display_path, format_override
from harness.distributed.launcher import launcher
from harness.errors import UserError
from harness.files import LIBRARY, MAX_YAML, read_bytes
from harness.suggestions import suggest
from harness.targets import RULES, read_rules
from harness.untrusted import check_yaml, parse_yaml

LIBRARY_CONF = LIBRARY / "conf"
BOM = "\ufeff"
DEFAULT_RULES = LIBRARY / "command" / "default_rules.yaml"


class HarnessConfigFiles(SearchPathPlugin):
    """Add the library's folder to Hydra's search path, after the user's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder; Hydra calls this method of each plugin."""
        search_path.append("harness", f"file://{LIBRARY_CONF}")


Plugins.instance().register(HarnessConfigFiles)
for _name, _resolver in (  # ${num_nodes:} and others in YAML files
    ("num_gpus_or", lambda default: num_gpus() or default),
    ("num_nodes", lambda: launcher().num_nodes),
    ("num_started_or", lambda n: n if launcher().name == "python" else launcher().num_here),
):
    # The values are cached for each config, because NVML takes milliseconds.
    register_resolver(_name, _resolver)


def hydra_compose(
    task: str, overrides: Sequence[str], conf: Path, with_hydra: bool = False
) -> DictConfig:
    """Return the config that Hydra composes for a command's overrides."""
    with config_folder(conf):
        return hydra.compose(task, list(overrides), return_hydra_config=with_hydra)


def folders(conf: Path, overrides: Sequence[str]) -> list[Path]:
    """Return the folder of the config files, and the folders that ``hydra.searchpath`` adds."""
    added = re.findall(r"file://([^,\]\s'\"]+)", " ".join(overrides))
    return [conf, *map(Path, added)]


def check_sizes(folders: Sequence[Path]) -> None:
    """Raise a ``UserError`` for a YAML file that is too large for a config, before Hydra reads it.

    See ``untrusted.check_yaml``.
    """
    for path in (path for folder in folders for path in folder.rglob("*.yaml")):
        try:
            data = read_bytes(path.resolve(), MAX_YAML)
            check_yaml(data)
            if BOM in data.decode()[:1]:  # Hydra would not find # @package in the first line
                raise ValueError("it begins with a byte order mark. Save it without one")
        except OSError:
            continue  # if the command needs this file, Hydra raises an error
        except UnicodeDecodeError as error:
            raise UserError(f"{display_path(path)}: {error}. Save the file as UTF-8.") from error
        except ValueError as error:
            raise UserError(f"{display_path(path)} is not a config file: {error}.") from error


def refuse_clash(folders: Sequence[Path], choices: Any, group: str, later: str) -> None:
    """Raise a ``UserError`` if a file of ``group`` sets a key that a file of ``later`` replaces.

    Hydra would replace the value without a warning.
    """
    files = _chosen(folders, group, choices.get(group))
    replacing = {
        key: value for _, node in _chosen(folders, later, choices.get(later)) for key, value in node
    }
    for path, node in files:
        for key, value in node:
            if key in replacing and replacing[key] != value:
                raise UserError(
                    f"{display_path(path)} sets {key}: {format_override(value)}, but "
                    f"{later}={choices[later]} replaces this value by "
                    f"{format_override(replacing[key])}.\nRemove strategy, devices and accelerator "
                    "from that file, and choose them by strategy=ddp trainer.devices=2, in the "
                    "command or in an experiment."
                )


def _chosen(folders: Sequence[Path], group: str, name: Any) -> list[tuple[Path, Any]]:
    """Return a group's chosen YAML file and the files in its defaults, with their items."""
    paths = [Path(folder, group, f"{name}.yaml") for folder in (*folders, LIBRARY_CONF)]
    path = next((path for path in paths if path.is_file()), None)
    node = yaml.safe_load(path.read_text(encoding="utf-8")) if path is not None else None
    if path is None or not isinstance(node, dict):
        return []
    items = [(key, value) for key, value in node.items() if key != "defaults"]
    defaults = [
        default
        for default in node.get("defaults") or ()
        if isinstance(default, str) and default not in ("_self_", name)
    ]
    return [*(file for name in defaults for file in _chosen(folders, group, name)), (path, items)]


def groups(conf: Path) -> set[str]:
    """Return the config groups, such as ``model`` and ``model/scheduler``."""
    return {
        path.relative_to(folder).as_posix()
        for folder in (conf, LIBRARY_CONF)
        for path in folder.rglob("*")
        if path.is_dir()
    }


def choices(conf: Path, group: str) -> list[str]:
    """Return the names of a group's files."""
    return sorted(
        {path.stem for folder in (conf, LIBRARY_CONF) for path in folder.glob(f"{group}/*.yaml")}
    )


def rules(conf: Path) -> dict[str, Any]:
    """Return the library's rules, extended by the rules of the user's ``rules.yaml``.

    Raises:
        UserError: if a rule is unknown, or has another type than the library's.
    """
    merged: dict[str, Any] = parse_yaml(DEFAULT_RULES.read_bytes())
    path = display_path(conf / RULES)
    for name, rule in read_rules(conf).items():
        if name == "allowed":
            continue  # ``targets.load_rules`` reads it
        if name not in merged:
            hint = suggest(str(name), list(merged))
            raise UserError(f"{path}: there is no rule {name}.{hint}")
        default = merged[name]
        if type(rule) is not type(default):
            kind = "a list" if isinstance(default, list) else "keys with a list each"
            raise UserError(f"{path}: {name}: {rule} must be {kind}.")
        merged[name] = default | rule if isinstance(default, dict) else default + rule
    for key, values in merged["takes"].items():
        if not isinstance(values, list) or not values:
            raise UserError(
                f"{path}: takes: {key}: {values} must be a list of the allowed values, such as "
                "[1..] for any integer from 1."
            )
    return merged
