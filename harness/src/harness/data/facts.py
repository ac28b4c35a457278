"""Facts of the data that a config may refer to: sizes, scales, class names.

In: a value such as ``from_data.num_classes`` in a config. Out: the data module's fact of that name,
or else its attribute. A training run writes the facts to ``data.json`` in its folder. Resumed runs
and all commands that use its checkpoints read the facts from there.
"""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness.data.datamodule import DataModule
from harness.errors import UserError
from harness.files import MAX_JSON, read_bytes, read_yaml
from harness.untrusted import parse_json

FILE = "data.json"
PREFIX = "from_data."


def read_facts(run_dir: Path) -> dict[str, Any]:
    """Return a run's facts, or ``{}`` if it has no file; raise if the file is damaged."""
    path = run_dir / FILE
    if not path.exists():
        return {}
    try:
        is_json = read_bytes(path, MAX_JSON).startswith(b"{")  # version 0.3: no checksum
        text = "\n" * is_json + (path.read_text() if is_json else read_yaml(path, MAX_JSON))
        return dict(parse_json(text.partition("\n")[2].encode()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}. Restore it from a backup.") from error


def restore_facts(data: Any, run_dir: Path) -> None:
    """Give a data module the facts that the training of its run stored."""
    if isinstance(data, DataModule) and (run_dir / FILE).is_file():
        data.facts = read_facts(run_dir)


def fill_in(cfg: DictConfig, data: Any, run_dir: Path | None = None) -> dict[str, Any]:
    """Replace the ``from_data.`` values of a config in place, and return all facts to store.

    Without a ``DataModule``, the facts come from ``run_dir``, the folder of the training.

    Raises:
        UserError: if a value names a fact that the data does not have, or that is not plain.
    """
    if isinstance(data, DataModule):
        facts = dict(data.facts)
    else:
        facts = read_facts(run_dir) if run_dir else {}

    def fill(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: fill(child, f"{key}.{name}") for name, child in value.items()}
        if isinstance(value, list):
            return [fill(child, f"{key}[{i}]") for i, child in enumerate(value)]
        if not (isinstance(value, str) and value.startswith(PREFIX)):
            return value
        name = value.removeprefix(PREFIX)
        fact: Any = facts[name] if name in facts else getattr(data, name, None)
        if fact is None:
            kind = type(data).__name__
            reason = "there is no data module" if data is None else f"{kind} has no {name}"
            raise UserError(f"{key}={value}, but {reason}. Set a value: {key}=<value>.")
        facts[name] = fact.tolist() if hasattr(fact, "tolist") else fact  # NumPy or torch
        try:
            json.dumps(facts[name])
        except TypeError as error:
            raise UserError(
                f"{key}={value} is of type {type(fact).__name__}, but a fact is a number, a text, "
                "a list or a dict.\n"
                f"Build the object in the config: {key}._target_=<class or function>."
            ) from error
        return facts[name]

    container: Any = OmegaConf.to_container(cfg, resolve=True)
    for key in ("model", "callbacks"):
        if container.get(key) is not None:
            cfg[key] = fill(container[key], key)
    return facts
