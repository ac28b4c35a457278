"""Why two runs depart, as far as that can be told, and the line to change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.prove.records import Departure
from harness.prove.runs import Strategy
from harness.prove.verdicts import BROKEN, DEFINITION


@dataclass(frozen=True)
class Reason:
    """Whether a promise can hold at all, why it does not, and what to write instead."""

    status: str
    why: str
    line: str = ""


def of_departure(
    found: Sequence[Departure], how: Strategy, facts: dict[str, Any], probe: dict[str, Any]
) -> Reason:
    """The likely reason why a strategy's run departs from one process.

    Args:
        found: the first departure of each kind; BatchNorm is none of their reasons.
        how: the strategy.
        facts: what the run has recorded of its module.
        probe: what a look into its training step has found.
    """
    weights = next((d for d in found if d.kind == "parameter"), None)
    metric = next((d for d in found if d.kind == "metric"), None)
    if facts.get("stream") and how.num_processes > 1:
        return Reason(DEFINITION, "a stream: a step takes other samples than in one process")
    if metric and (weights is None or metric.step < weights.step):
        return _of_metric(metric, facts)
    at = f" ({probe['place']})" if probe.get("place") else ""
    step, loss = probe.get("step", {}), probe.get("loss", {})
    of_loss = _of_loss(loss, at) if how.num_processes > 1 else None
    if of_loss and loss["kind"] in ("weighted", "sum"):
        return of_loss
    if written := step.get("written"):
        names, who = ", ".join(written), "device" if how.kind == "dp" else "process"
        return Reason(
            BROKEN,
            f"likely: {names} is written from the samples of one {who}{at}",
            f"# write {written[0]} in training_step, not in forward"
            if how.kind == "dp"
            else f"# write {written[0]} from self.all_gather(...), or keep it out of the loss",
        )
    if of_loss:
        return of_loss
    if step.get("draws"):
        return _drawn(step["draws"], how)
    if not probe.get("automatic", True):
        return Reason(BROKEN, "optimised by hand: its losses are not looked into; are they means?")
    errors = [x["error"] for x in (step, loss) if "error" in x]
    looked = f" (the step could not be looked into: {'; '.join(errors)})" if errors else ""
    why = f"no likely reason was found{looked}: look at what the step does with a share{at}"
    return Reason(BROKEN, why)


def _of_loss(loss: dict[str, Any], at: str) -> Reason | None:
    kind = loss.get("kind")
    told = (
        "what mean_over was told is not what the loss is a mean over; "
        if loss.get("declared")
        else ""
    )
    if kind == "weighted":
        one, two = loss["samples"]
        exact = one / (one + two)
        share = f"{one} of {one + two} samples count {loss['share']:.4f} of it, not {exact:.4f}"
        return Reason(
            BROKEN,
            f"likely: {told}the loss is a mean over something else than samples: {share}{at}",
            "return mean_over(loss, <number of what it is a mean over>)",
        )
    if kind == "sum":
        return Reason(
            BROKEN,
            f"likely: {told}the loss is a sum over samples, and processes average{at}",
            "return loss / <number of samples in the batch>",
        )
    if kind == "means":
        return Reason(
            BROKEN,
            f"likely: {told}the loss has terms that are means over different things, or is made of "
            f"statistics of the batch{at}",
            "return mean_over(one, <number>) + other  # or strategy=dp, strategy=ddp2",
        )
    if kind == "coupled" or loss.get("coupled"):
        return Reason(
            DEFINITION,
            "the loss looks at the whole batch: a process's share gives another one",
            "strategy=dp, or strategy=ddp2 for the node's whole batch",
        )
    return None


def _drawn(draws: dict[str, str], how: Strategy) -> Reason:
    who = "device" if how.num_processes == 1 else "process"
    places = ", ".join(f"{name} at {place}" if name else place for place, name in draws.items())
    return Reason(DEFINITION, f"each {who} draws its own random numbers: {places}")


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
