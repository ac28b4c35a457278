"""A number that is not finite stops the run, is named, and is in no checkpoint."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.checkpoints.lookup import by_step
from harness.errors import TrainingError
from harness.monitoring import non_finite
from harness.monitoring.non_finite import STEPS_BETWEEN, NonFinite, first_bad_weight
from harness.training import train as run
from tests.faults.fork_server import command
from tests.modules.classifiers import Classifier
from tests.monitoring.test_replicas import DDP, SHORT
from tests.parity.test_final_values import plateau
from tests.strategy_runs import write_conf
from tests.workers.disturb import disturb

# A warning of torchmetrics about the loss, before the backward pass.
pytestmark = pytest.mark.filterwarnings("ignore:Encountered `nan` values in tensor")
WEIGHT = "net.layers.3.weight"


def train(make_cfg, *overrides: str) -> Path:
    settings = ("strategy=cpu", "trainer.enable_progress_bar=false", "checkpoint.every_n_steps=1")
    cfg = make_cfg(*SHORT, *settings, *overrides)
    try:
        run.train(cfg)
    finally:
        for path in by_step(Path(cfg.run_dir, "checkpoints")):
            weights = torch.load(path, weights_only=True)["state_dict"]
            assert all(weight.isfinite().all() for weight in weights.values()), path
    return Path(cfg.run_dir)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (disturb(what="batch", value="inf"), "Step 3: the loss is nan, and every weight .*step_3"),
        # By what it did to its weight: the next loss shows it where no checkpoint is written.
        (
            [*disturb(what="gradient", name=WEIGHT), "checkpoint.every_n_steps=null"],
            f"Step 3: the gradient of {WEIGHT} was not finite",
        ),
        (disturb(what="gradient", name=WEIGHT), f"Step 4: {WEIGHT} is not finite.*step_3.ckpt"),
    ],
)
def test_what_is_not_finite_stops_the_run_is_named_and_is_in_no_checkpoint(
    overrides: list[str], says: str, make_cfg
) -> None:
    with pytest.raises(TrainingError, match=f"(?s){says}"):
        train(make_cfg, *overrides, "trainer.check_val_every_n_epoch=2")


def test_run_without_a_checkpoint_says_so_and_the_look_can_be_left_out(make_cfg) -> None:
    overrides = disturb(what="batch", step=0)
    with pytest.raises(TrainingError, match="There is no checkpoint yet"):
        train(make_cfg, *overrides)
    cfg = make_cfg(*SHORT, "strategy=cpu", "callbacks.non_finite=null", *overrides)
    cfg.trainer.enable_progress_bar = False
    run.train(cfg)


class Blind(Classifier):
    """Its validation gives no finite number in some epochs."""

    def __init__(self, bad_epochs: list[int]) -> None:
        super().__init__()
        self.bad_epochs = bad_epochs

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        bad = torch.nan if self.current_epoch in self.bad_epochs else 0.0
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]) + bad)

    def configure_optimizers(self) -> Any:
        return plateau(self, "val/loss")


def blind(folder: Path, bad_epochs: str, *overrides: str) -> Any:
    model = f"_target_: {__name__}.Blind\nbad_epochs: {bad_epochs}\n"
    chosen = write_conf(
        folder, model=model, data="_target_: tests.parity.test_final_values.Flowery\n"
    )
    short = ("trainer.max_epochs=4", "trainer.precision=64-true", "objective=val/loss", "mode=min")
    return command("train.py", *chosen, *short, "test=false", *overrides, f"output_dir={folder}")


def strict(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_an_objective_that_is_not_finite_at_first_ends_the_run_with_its_name(
    tmp_path: Path,
) -> None:
    ended = blind(tmp_path, "[0,1,2,3]", "strategy=ddp", "trainer.devices=2")
    assert ended.returncode == 1
    assert ended.stderr.count("ERROR: val/loss is nan in epoch 0") == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    (run_dir,) = (tmp_path / "default").iterdir()
    assert not (run_dir / "checkpoints/best.ckpt").exists()
    assert strict(run_dir / "record.json")["status"] == "failed"
    trained = blind(tmp_path / "on", "[0,1,2,3]", "callbacks.non_finite=null")
    assert trained.returncode == 0, trained.stderr
    (run_dir,) = (tmp_path / "on/default").iterdir()
    assert strict(run_dir / "results.json")["val/loss"] is None
    assert "best" not in strict(run_dir / "record.json")


def test_a_later_one_is_warned_of_once_and_no_reader_takes_it_for_the_best(tmp_path: Path) -> None:
    ended = blind(tmp_path, "[1,3]", "callbacks=top_k", "callbacks.checkpoint.save_top_k=2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("val/loss is nan in epoch 1") == 1, ended.stderr
    assert "nan in epoch 3" not in ended.stderr
    (run_dir,) = (tmp_path / "default").iterdir()
    saved = {path.name for path in (run_dir / "checkpoints").glob("best*epoch*")}
    assert {name.split("-")[1] for name in saved} == {"epoch=0", "epoch=2"}
    assert 0 < strict(run_dir / "record.json")["best"] < 10
    assert strict(run_dir / "results.json")["val/loss"] is None
    assert "The checkpoint of this epoch does not become the best. The plateau" in ended.stderr
    assert "Early stopping" not in ended.stderr
    late = blind(tmp_path / "late", "[1]", "+callbacks.checkpoint.every_n_epochs=3")
    assert late.returncode == 0, late.stderr  # the first value was finite, though nothing was saved
    stopped = blind(tmp_path / "stops", "[1,3]", "callbacks=early_stopping")
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped early" in stopped.stdout
    assert "val/loss = nan is not finite" in stopped.stdout.replace("\n" + " " * 17, " ")


def test_all_processes_end_when_one_has_found_it(tmp_path: Path) -> None:
    overrides = [*disturb(what="batch", rank=1), "callbacks.replicas=null"]
    result = command("train.py", *DDP, *SHORT, *overrides, f"output_dir={tmp_path}")
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("ERROR") == 1
    assert "Step 3 on rank 1: the loss is nan" in result.stderr
    assert "Traceback" not in result.stderr


def test_gradients_that_a_scaler_finds_too_large_are_its_own_affair() -> None:
    module: Any = nn.Linear(2, 2)
    trainer: Any = SimpleNamespace(
        precision_plugin=SimpleNamespace(scaler=object()),
        strategy=SimpleNamespace(checkpoint_io=None),
        world_size=1,
        global_step=0,
    )
    callback = NonFinite("nowhere")
    # The loss is multiplied by the scale, which may overflow in half precision.
    callback.on_before_backward(trainer, module, torch.tensor(torch.inf, dtype=torch.float16))
    with pytest.raises(TrainingError, match="the loss is nan"):
        callback.on_before_backward(trainer, module, torch.tensor(torch.nan))
    trainer.precision_plugin.scaler = None
    with pytest.raises(TrainingError, match="the loss is inf"):  # as 16-true has it
        callback.on_before_backward(trainer, module, torch.tensor(torch.inf, dtype=torch.float16))


def test_frozen_weights_may_be_infinite() -> None:
    """As masks are."""
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False).fill_(-torch.inf)
    assert first_bad_weight(module) is None
    module.weight.data[0, 0] = torch.nan
    assert first_bad_weight(module) == "weight"


def test_a_device_that_computes_beside_the_host_copies_the_bad_step(monkeypatch) -> None:
    monkeypatch.setattr(non_finite, "HOST", "")  # as if it was not the CPU
    module: Any = nn.Linear(2, 2)
    trainer: Any = SimpleNamespace(global_step=0, world_size=1, precision_plugin=None)
    trainer.strategy = SimpleNamespace(checkpoint_io=None)
    callback = NonFinite("nowhere")
    for trainer.global_step in range(2 * STEPS_BETWEEN):
        value = torch.nan if trainer.global_step in (7, 9) else 1.0
        callback.on_before_backward(trainer, module, torch.tensor(value))
    trainer.global_step += 1  # the copy of 20 steps ago is read
    with pytest.raises(TrainingError, match="Step 7: the loss is not finite"):
        callback.on_before_backward(trainer, module, torch.tensor(1.0))
    with pytest.raises(TrainingError, match="Step 7"):
        callback.on_save_checkpoint(trainer, module, {})
    callback.on_train_start()
    callback.on_save_checkpoint(trainer, module, {})


@pytest.mark.gpu
def test_gpu_is_not_waited_for_and_the_step_is_named() -> None:
    module: Any = nn.Linear(2, 2).cuda()
    trainer: Any = SimpleNamespace(global_step=0, world_size=1)
    trainer.strategy = SimpleNamespace(checkpoint_io=None)
    callback = NonFinite("nowhere")
    callback.on_train_start(trainer, module)
    losses = torch.tensor([1.0, torch.nan, 1.0], device="cuda")
    callback.on_before_backward(trainer, module, losses[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(50_000_000)
        for trainer.global_step in (1, 2):
            callback.on_before_backward(trainer, module, losses[trainer.global_step])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(TrainingError, match="Step 1: the loss is not finite"):
        callback.on_train_end(trainer, module)
