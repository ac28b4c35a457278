"""The config files within a command's reach: in the owner's folder, and in the harness's own.

In: the folder ``conf`` and words. Out: what Hydra composes of them, the groups and their files, and
the rules that a command is checked by. A file of the owner's wins over the harness's.
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
from omegaconf import DictConfig, OmegaConf

from harness.allowed import RULES, read_rules
from harness.errors import UserError
from harness.files import LIBRARY, MAX_YAML, read_bytes
from harness.machine import num_gpus
from harness.names import did_you_mean, shown, typed
from harness.processes.launcher import launcher
from harness.untrusted import check_yaml

OWN = LIBRARY / "conf"
DEFAULT_RULES = LIBRARY / "command" / "default_rules.yaml"


class HarnessConfigFiles(SearchPathPlugin):
    """Let Hydra search the harness's folder after the owner's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder, as Hydra asks every plugin of this kind."""
        search_path.append("harness", f"file://{OWN}")


Plugins.instance().register(HarnessConfigFiles)
for _name, _resolver in (  # ${num_nodes:} and others in YAML files
    ("num_gpus_or", lambda default: num_gpus() or default),
    ("num_nodes", lambda: launcher().num_nodes),
    ("num_started_or", lambda n: n if launcher().name == "python" else launcher().num_here),
):
    # Of a config each is asked once: NVML takes milliseconds.
    OmegaConf.register_new_resolver(_name, _resolver, replace=True, use_cache=True)


def hydra_compose(
    task: str, words: Sequence[str], conf: Path, with_hydra: bool = False
) -> DictConfig:
    """Let Hydra compose the config that a command's words make."""
    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        return hydra.compose(task, list(words), return_hydra_config=with_hydra)


def folders(conf: Path, words: Sequence[str]) -> list[Path]:
    """Return the folder of the config files, and those that ``hydra.searchpath`` adds."""
    added = re.findall(r"file://([^,\]\s'\"]+)", " ".join(words))
    return [conf, *map(Path, added)]


def check_sizes(folders: Sequence[Path]) -> None:
    """Refuse YAML files that stand for more than settings do, before Hydra reads one of them.

    Raises:
        UserError: with the file.
    """
    for path in (path for folder in folders for path in folder.rglob("*.yaml")):
        try:
            check_yaml(read_bytes(path.resolve(), MAX_YAML))
        except OSError:
            continue  # Hydra says so, if it is needed
        except ValueError as error:
            raise UserError(f"{shown(path)} is no file of settings: {error}.") from error


def refuse_clash(folders: Sequence[Path], choices: Any, group: str, later: str) -> None:
    """Refuse a group's file that sets a key to what another group replaces in silence.

    Raises:
        UserError: with the file and the key.
    """
    files = _chosen(folders, group, choices.get(group))
    wins = {
        key: value for _, node in _chosen(folders, later, choices.get(later)) for key, value in node
    }
    for path, node in files:
        for key, value in node:
            if key in wins and wins[key] != value:
                raise UserError(
                    f"{shown(path)} sets {key}: {typed(value)}, and {later}={choices[later]} "
                    f"replaces it by {typed(wins[key])}.\nLeave strategy, devices and accelerator "
                    "out of that file, and choose them with strategy=ddp trainer.devices=2, typed "
                    "or in an experiment."
                )


def _chosen(folders: Sequence[Path], group: str, name: Any) -> list[tuple[Path, Any]]:
    """Return a group's chosen YAML file and those that its defaults name, with their items."""
    paths = [Path(folder, group, f"{name}.yaml") for folder in (*folders, OWN)]
    path = next((path for path in paths if path.is_file()), None)
    node = yaml.safe_load(path.read_text(encoding="utf-8")) if path is not None else None
    if path is None or not isinstance(node, dict):
        return []
    items = [(key, value) for key, value in node.items() if key != "defaults"]
    parts = [
        one
        for one in node.get("defaults") or ()
        if isinstance(one, str) and one not in ("_self_", name)
    ]
    return [*(file for part in parts for file in _chosen(folders, group, part)), (path, items)]


def groups(conf: Path) -> set[str]:
    """List the groups of config files, such as ``model`` and ``model/scheduler``."""
    return {
        path.relative_to(folder).as_posix()
        for folder in (conf, OWN)
        for path in folder.rglob("*")
        if path.is_dir()
    }


def choices(conf: Path, group: str) -> list[str]:
    """List the names of a group's files."""
    return sorted({path.stem for folder in (conf, OWN) for path in folder.glob(f"{group}/*.yaml")})


def rules(conf: Path) -> dict[str, Any]:
    """Read the harness's rules, and add those of the owner's ``rules.yaml``.

    Raises:
        UserError: if a rule is unknown, or of another kind than the harness's.
    """
    merged: dict[str, Any] = yaml.safe_load(DEFAULT_RULES.read_text(encoding="utf-8"))
    place = shown(conf / RULES)
    for name, own in read_rules(conf).items():
        if name == "allowed":
            continue  # harness.allowed has read them
        if name not in merged:
            hint = did_you_mean(str(name), list(merged))
            raise UserError(f"{place}: there is no rule {name}.{hint}")
        default = merged[name]
        if type(own) is not type(default):
            kind = "a list" if isinstance(default, list) else "keys with a list each"
            raise UserError(f"{place}: {name}: {own} must be {kind}.")
        merged[name] = default | own if isinstance(default, dict) else default + own
    for key, values in merged["takes"].items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{place}: takes: {key}: {values} must be a list, such as [1..].")
    return merged
