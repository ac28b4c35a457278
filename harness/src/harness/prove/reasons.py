"""Why two runs depart, as far as that can be told, and the line to change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.prove.records import Departure
from harness.prove.runs import Strategy
from harness.prove.verdicts import BROKEN, DEFINITION

OTHER_STRATEGY = "strategy=dp or ddp2"  # is advised where a loss looks at the whole batch


@dataclass(frozen=True)
class Reason:
    """Whether a promise can hold at all, why it does not, and what to write instead."""

    status: str
    why: str
    line: str = ""


def of_departure(
    found: Sequence[Departure], how: Strategy, facts: dict[str, Any], told: str
) -> Reason:
    """Why a strategy's run departs from one process, as far as the run itself says it.

    Args:
        found: the first departure of each kind; BatchNorm is none of their reasons.
        how: the strategy.
        facts: what one process has recorded of its module.
        told: the strategy's run's own warning that its result is another one.
    """
    weights = next((d for d in found if d.kind == "parameter"), None)
    metric = next((d for d in found if d.kind == "metric"), None)
    if facts.get("stream") and how.num_processes > 1:
        return Reason(DEFINITION, "a stream: a step takes other samples than in one process")
    if metric and (weights is None or metric.step < weights.step):
        return _of_metric(metric, facts)
    if told:
        return Reason(DEFINITION if OTHER_STRATEGY in told else BROKEN, f"the run says: {told}")
    if facts.get("draws"):
        who = "device" if how.num_processes == 1 else "process"
        return Reason(DEFINITION, f"the step draws random numbers, each {who} its own")
    return Reason(BROKEN, f"look at what the step does with a share ({facts['place']})")


def _of_metric(metric: Departure, facts: dict[str, Any]) -> Reason:
    logged = facts.get("logged", {}).get(metric.name.partition("/dataloader_idx_")[0], {})
    settings = logged.get("how", {})
    options = ", ".join(f"{key}={value}" for key, value in settings.items())
    at = f"a {logged.get('kind')} logged at {logged.get('place')}" + (
        f" with {options}" if options else ""
    )
    why = "likely it is made of one process's samples, or what is gathered is counted again by each"
    return Reason(BROKEN, f"{why}; {at}", _synced(metric, settings))


def _synced(metric: Departure, settings: dict[str, Any]) -> str:
    kept = {k: v for k, v in settings.items() if k in ("reduce_fx", "on_epoch") and v is not None}
    more = "".join(f", {key}={v!r}" for key, v in (kept | {"sync_dist": True}).items())
    return f'self.log("{metric.name}", <value>{more})  # or a metric of torchmetrics'


def of_resume(found: Sequence[Departure], forgotten: list[str]) -> Reason:
    """The likely reason why a run that was killed does not end as one that was not.

    Args:
        found: the first departure of each kind.
        forgotten: what had changed before the kill, and is not in the checkpoint.
    """
    if forgotten:
        leaf = forgotten[0].removeprefix("len(").removesuffix(")").rpartition(".")[2]
        return Reason(
            BROKEN,
            f"likely: {', '.join(forgotten[:3])} changes in training and is not in the checkpoint",
            f'self.register_buffer("{leaf}", ...)  # in __init__; of a list, clear it each epoch',
        )
    if any(d.kind == "metric" for d in found) and not any(d.kind == "parameter" for d in found):
        return Reason(BROKEN, "likely: the module keeps from batch to batch what no checkpoint has")
    return Reason(
        BROKEN,
        "likely: the module, a callback or the data keeps something that no checkpoint has",
        "def on_save_checkpoint(self, checkpoint): checkpoint[...] = ...",
    )
