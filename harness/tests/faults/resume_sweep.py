"""Resume from every step of a short run, and compare all that is left with the run itself."""

import contextlib
import io
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from harness.checkpoints.lookup import by_step
from harness.command.compose import compose
from harness.training import train as run
from tests.faults.run_folder import contents, differences, leave_at

COMMON = (
    "data=synthetic",
    "model=mlp",
    "strategy=cpu",
    "data.batch_size=300",  # 1,250 samples: 5 steps an epoch, the last of them smaller
    "data.noise=0.1",
    "model.net.hidden=[8]",
    "model.net.dropout=0.2",
    "trainer.max_epochs=3",
    "trainer.log_every_n_steps=2",
    "trainer.enable_progress_bar=false",
    "checkpoint.every_n_steps=1",
    "checkpoint.num_kept=1000",
)
PLAIN = (
    "model._target_=tests.faults.plain_module.PlainModule",
    "callbacks.learning_rate=null",
)
# A short run with all features, which the fast suite resumes from every step.
ALL = (
    "model._target_=tests.checkpoints.kept.Everything",
    "data._target_=tests.checkpoints.kept.Data",
    "+callbacks.recorder._target_=tests.checkpoints.kept.Recorder",
    "+callbacks.ema._target_=pytorch_lightning.callbacks.EMAWeightAveraging",
    "+callbacks.ema.decay=0.8",
    "callbacks.checkpoint.save_top_k=2",
    "callbacks.checkpoint.filename='{step}'",
    "callbacks.learning_rate=null",
    "trainer.num_sanity_val_steps=2",
    "data.batch_size=500",  # 3 batches an epoch, the last of them smaller: 2 steps
    "trainer.accumulate_grad_batches=2",
    "trainer.val_check_interval=2",
    "trainer.max_epochs=2",
    "test=false",
)
PLATEAU = (
    "model.scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",
    "~model.scheduler.max_lr",
    "+model.scheduler.patience=0",
    "+model.scheduler.threshold=0.9",
)
SHORT = ("data.batch_size=500", "trainer.max_epochs=2")  # 3 steps an epoch
OWN = ("model.net=null", "model.num_classes=1", "objective=val/loss")
RELOADED = (
    *("model._target_=tests.checkpoints.reloaded.Module", *OWN, "callbacks.learning_rate=null"),
    "data._target_=tests.checkpoints.reloaded.Data",
    "+trainer.reload_dataloaders_every_n_epochs=2",
    "trainer.max_epochs=4",
)
WRAPPED = ("model._target_=tests.checkpoints.kept.Wrapped", "callbacks.learning_rate=null")
FAST: dict[str, tuple[str, ...]] = {
    "all features, every attribute that training changes": ALL,
}
LESS_FAST: dict[str, tuple[str, ...]] = {
    "every kind of log and metric, workers": (*PLAIN, *SHORT, "data.num_workers=1"),
    "loaders that depend on the epoch of their making": RELOADED,
    "wrappers of metrics, double precision": (*WRAPPED, *SHORT, "trainer.precision=64-true"),
}
SLOW: dict[str, tuple[str, ...]] = {
    "ReduceLROnPlateau": (*PLATEAU, "model.scheduler_interval=epoch"),
    "ReduceLROnPlateau of steps, validation between them": (
        *PLATEAU,
        "+model.scheduler_monitor=train/loss",
        "trainer.log_every_n_steps=1",
        "trainer.val_check_interval=2",
        "trainer.max_epochs=2",
    ),
    "batches that fit": ("data.max_samples_per_device=130", "trainer.val_check_interval=0.5"),
    "max_steps, validation every 3 batches of all, part of an epoch": (
        "trainer.max_steps=12",
        "trainer.max_epochs=-1",
        "trainer.limit_train_batches=4",
        "trainer.val_check_interval=3",
        "trainer.check_val_every_n_epoch=null",
    ),
    "top 2, early stopping, EMA": (
        "callbacks=[early_stopping,ema,top_k]",
        "callbacks.early_stopping.patience=2",
        "callbacks.checkpoint.save_top_k=2",
        "trainer.max_epochs=5",
        "trainer.val_check_interval=2",
    ),
    "gradients that wait, double precision": (
        "model._target_=tests.faults.plain_module.TwoPaces",
        "callbacks.learning_rate=null",
        "trainer.precision=64-true",
    ),
    "accumulation that grows": (
        "+callbacks.grow._target_=pytorch_lightning.callbacks.GradientAccumulationScheduler",
        "+callbacks.grow.scheduling={0: 1, 1: 2}",
    ),
}


def train(cfg: DictConfig) -> None:
    """Train in this process, in silence."""
    with contextlib.redirect_stdout(io.StringIO()):
        run.train(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)))


def sweep(words: Sequence[str], folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield for each safe point of a run what differs when it is resumed from there."""
    run_dir, reference_dir = folder / "run", folder / "reference"
    run_dir.mkdir(parents=True)
    cfg = compose("train", [*COMMON, *words, f"run_dir={run_dir}"])
    train(cfg)
    run_dir.rename(reference_dir)
    reference = contents(reference_dir)
    for checkpoint in by_step(reference_dir / "checkpoints"):
        # All that the run left stays, as if it had been killed at its very end and only this
        # checkpoint were whole.
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(reference_dir, run_dir, symlinks=True)
        leave_at(run_dir, int(checkpoint.stem.removeprefix("step_")), keeps_results=True)
        cfg.resume = str(run_dir / "checkpoints" / checkpoint.name)
        train(cfg)
        told = (run_dir / "run.log").read_text().splitlines()
        wrong = [
            line
            for line in told
            if "The resumed run did not restore" in line or "draws other" in line
        ]
        yield checkpoint.stem, wrong + differences(reference, contents(run_dir))
