"""One file lists versions and private names; with others a run warns or is refused."""

import ast
import gc
import inspect
import weakref
from functools import lru_cache, partial
from typing import Any
from unittest.mock import Mock

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from pytorch_lightning.loops import training_epoch_loop
from pytorch_lightning.profilers import PassThroughProfiler, SimpleProfiler

from harness.command import main
from harness.compat import quick_start, step_overhead, versions
from harness.errors import UserError
from harness.parity.seeded_steps import SeededSteps
from tests.compat.test_border import ALLOWED, is_private, own_names
from tests.conftest import LIBRARY

MOST_NAMES = 40

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says of a Trainer


@pytest.fixture
def trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


def all_names(trainer: pl.Trainer) -> list[tuple[Any, str]]:
    listed = versions.private_names(trainer)
    return [(owner, name) for owner, names in listed for name in names.split()]


def test_upstream_has_every_name_and_there_are_few(trainer: pl.Trainer) -> None:
    """Also what is only assigned, which would otherwise go unnoticed."""
    names = all_names(trainer)
    assert [name for owner, name in names if not hasattr(owner, name)] == []
    assert len(names) <= MOST_NAMES


def test_every_touch_is_in_the_list(trainer: pl.Trainer) -> None:
    listed = {name for _, name in all_names(trainer)} | {"_python_dispatch", "_dynamo"}
    for path in (LIBRARY / "src/harness/compat").glob("*.py"):
        tree, used = ast.parse(path.read_text()), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                used |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
            elif isinstance(node, ast.Constant):
                used |= {str(node.value)} - ALLOWED.keys()
        if path.stem != "versions":
            assert set(filter(is_private, used)) - own_names(tree) - listed == set(), path.stem


def test_bounds_are_those_of_the_project() -> None:
    text = (LIBRARY / "requirements.txt").read_text()
    for package, bounds in versions.TESTED.items():
        assert f"{package}{bounds}\n" in text


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a Lightning that was not tested."""
    real, package, number = versions.version, "pytorch-lightning", "2.7.0"
    monkeypatch.setattr(versions, "version", lambda name: number if name == package else real(name))
    monkeypatch.setattr(versions, "untested", versions.untested.__wrapped__)
    return f"{package} {number}"


def test_another_version_is_warned_of_once(
    trainer: pl.Trainer, newer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(versions, "warn_once", lru_cache(said.append))
    versions.check(trainer)
    versions.check(trainer)
    (line,) = said
    assert f"{newer} was not tested" in line
    assert f"pip install 'pytorch-lightning{versions.TESTED['pytorch-lightning']}'" in line


def test_a_version_without_a_private_name_is_refused_by_it(
    trainer: pl.Trainer, newer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "private_names", lambda _: [(trainer, "world_size _gone")])
    with pytest.raises(UserError, match=rf"^{newer} cannot be used: .*_gone.*\nRun .*$"):
        versions.check(trainer)


def test_a_name_that_is_imported_and_gone_is_refused_as_well(
    newer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ImportError("cannot import name '_gone'")

    monkeypatch.setattr(quick_start, "import_torchmetrics", fail)
    cfg = OmegaConf.create(
        {"gpus": {"order": "visible"}, "trainer": {"devices": 1, "strategy": "auto"}}
    )
    with pytest.raises(UserError, match=rf"^{newer} cannot be used: .*_gone.*\nRun .*$"):
        main.run_task("train", cfg)
    monkeypatch.setattr(versions, "untested", list)
    with pytest.raises(ImportError, match=r"^cannot import name '_gone'$"):
        main.run_task("train", cfg)


def test_only_a_profiler_that_nobody_asked_for_is_replaced(trainer: pl.Trainer) -> None:
    step_overhead.skip_needless_work(trainer)
    assert isinstance(trainer.profiler, PassThroughProfiler)
    with trainer.profiler.profile("a"), trainer.profiler.profile("b"):
        assert type(trainer.profiler) is step_overhead.NoProfiler
    wanted = trainer.profiler = SimpleProfiler()
    step_overhead.skip_needless_work(trainer)
    assert trainer.profiler is wanted


def test_hooks_that_callbacks_of_the_harness_lack_are_left_out_and_no_others(
    trainer: pl.Trainer,
) -> None:
    class Own(pl.Callback): ...

    given = pl.callbacks.LambdaCallback(on_train_batch_end=print)
    trainer.callbacks = [SeededSteps(0), given, Own()]  # type: ignore[attr-defined]
    step_overhead.skip_needless_work(trainer)
    seeded, given, own = trainer.callbacks  # type: ignore[attr-defined]
    assert callable(seeded.on_train_batch_start)
    assert callable(seeded.on_train_epoch_start)
    assert not callable(seeded.on_before_zero_grad)
    assert given.on_train_batch_end is print
    assert vars(own) == {}


def test_a_signature_is_inspected_once(trainer: pl.Trainer, monkeypatch: Any) -> None:
    class One(pl.LightningModule):
        def training_step(self, batch: Any) -> None: ...

    class Two(pl.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    step_overhead.skip_needless_work(trainer)
    inspected = Mock(wraps=inspect.getfullargspec)
    monkeypatch.setattr(inspect, "getfullargspec", inspected)
    has_parameter = training_epoch_loop.is_param_in_hook_signature
    modules = [One(), Two(), One(), Two()]
    found = [has_parameter(module.training_step, "batch_idx", min_args=2) for module in modules]
    assert found == [False, True] * 2
    assert inspected.call_count == 2
    modules[-1].training_step = partial(Two.training_step, modules[-1])  # type: ignore[method-assign]
    assert has_parameter(modules[-1].training_step, "batch_idx")
    inspected.reset_mock()  # it holds the arguments of its calls
    kept = weakref.ref(modules.pop())
    gc.collect()
    assert kept() is None


def test_a_modules_attributes_are_set_as_before(trainer: pl.Trainer) -> None:
    step_overhead.skip_needless_work(trainer)
    module = pl.LightningModule()
    module.layer, module.number = torch.nn.Linear(1, 1), 2
    module._current_fx_name = "training_step"
    assert [*module._modules] == ["layer"]
    assert vars(module)["number"] == 2
    assert vars(module)["_current_fx_name"] == "training_step"
