"""``debug=trace``: where a step's time goes, and files that Perfetto reads."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.watch.trace import table
from tests_harness.faults.fork_server import command
from tests_harness.strategy_runs import STRATEGIES, execute

TINY = ("data=synthetic", "model=mlp")


def event(name: str, milliseconds: float, *inside: Any) -> Any:
    return SimpleNamespace(
        name=name,
        cpu_time_total=milliseconds * 1000,
        cpu_children=inside,
        time_range=SimpleNamespace(elapsed_us=lambda: milliseconds * 1000),
    )


def test_innermost_range_decides_and_all_of_a_step_is_in_the_table() -> None:
    """As Lightning nests them: the optimizer's step holds forward and backward."""
    forward = event("[Strategy]DDPStrategy.training_step", 10, event("aten::mm", 8))
    hook = event("[Callback]Mine.on_before_backward", 2)
    engine = event("autograd::engine::evaluate_function: MmBackward0", 12)
    backward = event("[Strategy]DDPStrategy.backward", 20, engine, hook)
    optimizer = event("Optimizer.step#SGD.step", 37, forward, backward)
    batch = event("run_training_batch", 40, optimizer, event("[Callback]Log.on_train_batch_end", 1))
    asked = event("[_TrainingEpochLoop].train_dataloader_next", 5, event("aten::index_select", 4))
    steps = [event(f"ProfilerStep#{k}", 50, asked, batch) for k in range(2)]
    rows = [line.split("  ") for line in table([*steps, event("gloo:all_reduce", 8)])]
    found = {row[0]: float(re.findall(r"[\d.]+", " ".join(row[1:]))[0]) for row in rows[1:]}
    assert found == {
        "data": 5.0,
        "validation": 0.0,
        "callbacks and logging": 3.0,
        "optimizer": 7.0,
        "backward": 18.0,
        "forward": 10.0,
        "loop": 7.0,
        "all-reduce, meanwhile": 4.0,
    }


def read(path: Path) -> dict[str, list[float]]:
    """Microseconds of each range of a trace, by its name."""
    found: dict[str, list[float]] = {}
    for one in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        found.setdefault(one["name"], []).append(one.get("dur", 0))
    return found


@pytest.mark.parametrize("strategy", ["cpu", "dp(2)", "ddp(2)", "ddp2(2x2)"])
def test_each_process_traces_ten_steps(strategy: str, tmp_path: Path) -> None:
    status, said = execute([*TINY, "debug=trace"], strategy, tmp_path)
    assert status == 0, said
    (table,) = tmp_path.glob("default/*/fit-trace*.txt")
    assert re.search(r"^forward +\d+\.\d{3} +[\d.]+%$", table.read_text(), re.MULTILINE)
    assert "(10 steps)" in said
    assert "5.49 MFLOP per step" in said  # those of all processes and devices together
    traces = sorted(tmp_path.glob("default/*/trace_*.json.gz"))
    num_processes = 1 if STRATEGIES[strategy][0] in ("strategy=cpu", "strategy=dp") else 2
    assert [path.name for path in traces] == [f"trace_{k}.json.gz" for k in range(num_processes)]
    for path in traces:
        ranges = read(path)
        assert len([name for name in ranges if name.startswith("ProfilerStep#")]) == 10
        assert len(ranges["run_training_batch"]) >= 10
        assert any(name.endswith(".training_step") for name in ranges)
    assert ("all-reduce" in said) == (num_processes > 1)


def test_a_run_is_the_same_without_its_trace_and_says_where_it_was_too_short(
    tmp_path: Path,
) -> None:
    words = ["train.py", *TINY, "debug=trace", f"output_dir={tmp_path}"]
    results = []
    for more in ([], ["trainer.profiler=null"], ["trainer.max_steps=5"]):
        result = command(*words, f"name=run{len(results)}", *more)
        assert result.returncode == 0, result.stderr
        (path,) = tmp_path.glob(f"run{len(results)}/*/metrics.csv")
        results.append(path.read_bytes())
    assert results[0] == results[1]
    assert "No trace: there were no more than 10 batches." in result.stdout
    assert not [*tmp_path.glob("run2/*/trace_*")]
