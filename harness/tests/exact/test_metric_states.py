"""States of metrics gathered at once are what torchmetrics gathers, in two processes."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef

from harness.exact.metric_states import StatesTogether
from harness.processes.agreement import gather
from tests.strategy_runs import in_processes


class Odd(Metric):
    """States that are awkward to pack: empty, of few bytes, of other shapes than at first."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("flag", torch.tensor(False), dist_reduce_fx="max")
        self.add_state("half", torch.zeros(3, dtype=torch.bfloat16), dist_reduce_fx="sum")
        self.add_state("none", torch.zeros(0, 2), dist_reduce_fx=None)
        self.add_state("grows", torch.zeros(1), dist_reduce_fx=None)
        self.add_state("rows", torch.zeros(4, 2).t(), dist_reduce_fx="mean")  # not contiguous

    def update(self, values: Tensor) -> None:
        self.flag |= values.sum() > 0
        self.half += values[:3].to(torch.bfloat16)
        self.grows = torch.cat([self.grows, values[:2]])
        self.rows = self.rows + values[0]

    def compute(self) -> Any:
        return self.flag, self.half, self.none, [*self.grows], self.rows


def metrics() -> dict[str, Any]:
    return {
        "odd": Odd(),
        "auroc": BinaryAUROC(),  # keeps a list of every prediction
        "pearson": PearsonCorrCoef(),
        "group": MetricCollection({"f1": MulticlassF1Score(5), "macro": MulticlassF1Score(5)}),
    }


def updated(metric: Any, name: str, generator: torch.Generator) -> None:
    values = torch.rand(6, generator=generator) - 0.3
    match name:
        case "auroc":
            metric.update(values.abs(), values > 0)
        case "pearson":
            metric.update(values, values.roll(1) ** 2)
        case "group":
            metric.update((values * 50).long() % 5, (values * 30).long() % 5)
        case _:
            metric.update(values)


def bits(value: Any) -> str:
    return repr(
        [bits(one) for one in (value.values() if isinstance(value, dict) else value)]
        if isinstance(value, (list, tuple, dict))
        else (value.dtype, value.tolist())
    )


def compare(folder: Path) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    for name, theirs in metrics().items():
        ours = metrics()[name]
        for metric in ours.values() if name == "group" else [ours]:
            metric.dist_sync_fn = StatesTogether(metric)
        results = []
        for metric in theirs, ours:
            generator = torch.Generator().manual_seed(rank)
            for _ in range(3):  # what was gathered once must not be taken for what came later
                for _ in range(1 if name == "odd" else 1 + 2 * rank):
                    updated(metric, name, generator)
                results.append(bits(metric.compute()))
        assert results[:3] == results[3:], name
        assert len({*results[:3]}) > 1, name  # which was looked at
    trainer: Any = SimpleNamespace(world_size=2)
    for size in 0, 4096, 100_000:  # more than what is gathered at once
        mine = [rank, b"x" * (size if rank else 7)]
        assert gather(trainer, mine) == [[0, b"x" * 7], [1, b"x" * size]], size
    dist.barrier()
    dist.destroy_process_group()


def test_results_are_those_of_torchmetrics(tmp_path: Path) -> None:
    in_processes(2, compare, tmp_path)
