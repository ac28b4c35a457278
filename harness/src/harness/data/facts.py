"""Settings that a config takes from the data: sizes that a model needs, scales, names of classes.

In: ``from_data.num_classes`` in a config. Out: the fact of that name, or the data module's
attribute. A training writes its facts into its folder, as ``data.json``; a resumed run and whoever
uses its checkpoints read them there.
"""

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
    """Read the facts of a run; empty where it has none, a ``UserError`` if they were edited."""
    path = run_dir / FILE
    if not path.exists():
        return {}
    try:
        is_plain = read_bytes(path, MAX_JSON).startswith(b"{")  # of version 0.3
        text = "\n" * is_plain + (path.read_text() if is_plain else read_yaml(path, MAX_JSON))
        return dict(parse_json(text.partition("\n")[2].encode()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}. Bring it back from a copy.") from error


def hand_over(data: Any, run_dir: Path) -> None:
    """Give a data module what the training of a run has learnt."""
    if isinstance(data, DataModule) and (run_dir / FILE).is_file():
        data.facts = read_facts(run_dir)


def fill_in(cfg: DictConfig, data: Any, run_dir: Path | None = None) -> dict[str, Any]:
    """Fill in what a config takes from the data, in place; return the facts, to be stored.

    ``run_dir`` is that of the training, whose facts count where there is no ``DataModule``.

    Raises:
        UserError: if the data does not have what is asked for.
    """
    if isinstance(data, DataModule):
        facts = dict(data.facts)
    else:
        facts = read_facts(run_dir) if run_dir else {}

    def fill(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {name: fill(child, f"{place}.{name}") for name, child in value.items()}
        if isinstance(value, list):
            return [fill(child, f"{place}[{i}]") for i, child in enumerate(value)]
        if not (isinstance(value, str) and value.startswith(PREFIX)):
            return value
        name = value.removeprefix(PREFIX)
        fact: Any = facts[name] if name in facts else getattr(data, name, None)
        if fact is None:
            kind = "There is no data module" if data is None else f"{type(data).__name__} has none"
            raise UserError(f"{place}={value}: {kind}. Set it: {place}=<value>.")
        facts[name] = fact.tolist() if hasattr(fact, "tolist") else fact  # of NumPy or torch
        return facts[name]

    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    for key in ("model", "callbacks"):
        if plain.get(key) is not None:
            cfg[key] = fill(plain[key], key)
    return facts
