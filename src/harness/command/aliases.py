"""Names that earlier versions have saved in the configs of runs, and what they are called today."""

from importlib.util import find_spec
from typing import Any

# The machinery lay in the project's own package, under whatever name that had.
MODULES = {
    "callbacks.non_finite": "harness.watch.non_finite",
    "callbacks.progress_bar": "harness.watch.progress_bar",
    "callbacks.replicas": "harness.watch.replicas",
    "callbacks.throughput": "harness.watch.throughput",
    "loggers.metrics_table": "harness.loggers.metrics_table",
    "loggers.tensorboard": "harness.loggers.tensorboard",
    "strategies.ddp2": "harness.strategies.ddp2",
    "strategies.dp": "harness.strategies.dp",
}


def renamed(node: Any) -> Any:
    """A saved config, its values unresolved, whose every ``_target_`` names what there is today."""
    if isinstance(node, dict):
        values = {key: renamed(value) for key, value in node.items()}
        if isinstance(target := node.get("_target_"), str):
            values["_target_"] = today(target)
        return values
    return [renamed(value) for value in node] if isinstance(node, list) else node


def today(target: str) -> str:
    """Where a class is that an earlier version has named; the name itself where that holds."""
    module, _, name = target.rpartition(".")
    package, _, place = module.partition(".")
    if place not in MODULES or package == "harness" or exists(module):
        return target
    return f"{MODULES[place]}.{name}"


def exists(module: str) -> bool:
    """Whether a module can be imported; an owner may have one of the same name."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
