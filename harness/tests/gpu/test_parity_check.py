"""The parity check on a GPU: no memory, no false alarm, nothing alive afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.modules import wrong
from tests.gpu.runs import DOUBLE, GPU, QUIET, TINY, log_of, run
from tests.gpu.test_runs import SHORT, pictures
from tests.modules.kinds import INNOCENT, KINDS
from tests.strategy_runs import write_conf
from tests.verdicts.cells import PACKAGE

__all__ = ["pictures"]
pytestmark = pytest.mark.gpu
ACCUMULATED = "trainer.accumulate_grad_batches=2"
ALARMS = ("another experiment", "differs", "parity")
MIB = 2**20
# Kinds that are the same experiment when batches are accumulated, and kinds that are innocent.
SAME = [
    *("classifier", "gradient clipping, schedule by step", "schedule by validation"),
    *("loss in forward", "checkpointing", "collected in lists", "counted by hand"),
    *("two validation loaders", "`NamedTuple` outputs", "torchmetrics, also with lists"),
]


def alarms(run_dir: Path) -> list[str]:
    lines = log_of(run_dir).splitlines()
    return [line for line in lines if "WARNING" in line and any(word in line for word in ALARMS)]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("experiment=synthetic",),
        ("experiment=images",),
        ("experiment=table",),
        ("experiment=table_classes",),
        ("experiment=text", "data.length=32", "trainer.limit_val_batches=4"),
        ("experiment=synthetic", "trainer.precision=bf16-mixed"),
        ("trainer.precision=bf16-mixed", "channels_last=true"),
        ("tf32=true",),
        ("experiment=synthetic", "callbacks=ema"),
    ],
    ids=lambda overrides: "+".join(overrides) or "default",
)
def test_a_shipped_experiment_raises_no_alarm(
    overrides: tuple[str, ...], pictures: tuple[str, ...], tmp_path: Path
) -> None:
    overrides += pictures if overrides[:1] == ("experiment=images",) else ()
    assert alarms(run(tmp_path, *overrides, *SHORT, ACCUMULATED, *GPU)) == []


@pytest.mark.parametrize("kind", [*SAME, *list(INNOCENT)[:12]])
def test_a_kind_of_module_raises_no_alarm(kind: str, tmp_path: Path) -> None:
    one = (KINDS | INNOCENT)[kind]
    data = f"_target_: {PACKAGE}.data.{one.data}\ndataset: {one.dataset}\n"
    overrides = write_conf(tmp_path, data=data, model=f"_target_: {PACKAGE}.{one.model}\n")
    overrides += [w for w in one.overrides if w != ACCUMULATED]
    more = ("trainer.max_epochs=2", ACCUMULATED, DOUBLE, *QUIET, *GPU)
    assert alarms(run(tmp_path / "out", *overrides, *more)) == []


def test_the_check_takes_no_memory_and_leaves_nothing(tmp_path: Path) -> None:
    found: dict[bool, Any] = {}
    for is_on in (True, False):
        path = tmp_path / f"{is_on}.json"
        overrides = (*TINY, *wrong("nothing", "+model.net.width=65536"), ACCUMULATED, *GPU)
        overrides += ("+callbacks.memory._target_=tests.gpu.modules.Memory",)
        overrides += (f"+callbacks.memory.path={path}", f"parity_check={str(is_on).lower()}")
        run(tmp_path / str(is_on), *overrides, "model/optimizer=adamw")
        found[is_on] = json.loads(path.read_text())
    assert found[True]["peak"] <= found[False]["peak"] + MIB
    for with_check, without in zip(found[True]["alive"], found[False]["alive"], strict=True):
        assert with_check <= without + MIB
