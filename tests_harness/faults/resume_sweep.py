"""Resume from every step of a short run, and compare all that is left with the run itself."""

import contextlib
import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf

from harness.checkpoints.lookup import by_step, link_newest
from harness.command.compose import compose
from harness.run import tasks as run
from harness.text.sentences import sentences
from tests_harness.faults.run_folder import contents, differences
from tests_harness.images.made import words as words_of_images
from tests_harness.images.made import write_images
from tests_harness.tables.test_table import rows, written

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
    "callbacks.confusion_matrix=null",
    "callbacks.worst_mistakes=null",
    "checkpoint.every_n_steps=1",
    "checkpoint.num_kept=1000",
)
PLAIN = (
    "model._target_=tests_harness.faults.plain_module.PlainModule",
    "callbacks.learning_rate=null",
)
STEP_LR = ("model.scheduler._target_=torch.optim.lr_scheduler.StepLR", "~model.scheduler.max_lr")
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "dropout, OneCycle": (),
    "two workers": ("data.num_workers=2",),
    "workers not persistent": ("data.num_workers=1", "data.persistent_workers=false"),
    "StepLR per epoch": (
        *STEP_LR,
        "+model.scheduler.step_size=1",
        "model.scheduler_interval=epoch",
    ),
    "StepLR per step": (*STEP_LR, "+model.scheduler.step_size=2"),
    "ReduceLROnPlateau": (
        "model.scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",
        "~model.scheduler.max_lr",
        "+model.scheduler.patience=0",
        "+model.scheduler.threshold=0.9",
        "model.scheduler_interval=epoch",
    ),
    "constant rate, SGD": (
        "~model.scheduler",
        "+model.scheduler=null",
        "model.optimizer._target_=torch.optim.SGD",
    ),
    "validation every 2 batches": ("trainer.val_check_interval=2",),
    "validation every 3 batches of all": (
        "trainer.val_check_interval=3",
        "trainer.check_val_every_n_epoch=null",
    ),
    "validation every 2 epochs": ("trainer.check_val_every_n_epoch=2",),
    "accumulation": ("trainer.accumulate_grad_batches=3",),
    "batches that fit": ("data.max_samples_per_device=130", "trainer.val_check_interval=0.5"),
    "max_steps": ("trainer.max_steps=12", "trainer.max_epochs=-1"),
    "warm-up and cosine": ("model/scheduler=cosine", "model.scheduler.warmup=0.3"),
    "plateau": (
        "model/scheduler=plateau",
        "model.scheduler.patience=0",
        "+model.scheduler.threshold=0.9",
    ),
    "steps": ("model/scheduler=step", "model.scheduler.step_size=1"),
    "constant rate": ("model/scheduler=constant",),
    "EMA": ("callbacks=ema", "callbacks.ema.decay=0.8"),
    "EMA of Lightning": (
        "+callbacks.ema._target_=pytorch_lightning.callbacks.EMAWeightAveraging",
        "+callbacks.ema.decay=0.8",
    ),
    "EMA, BatchNorm, integers": (
        "callbacks=ema",
        "callbacks.ema.decay=0.8",
        "model.net._target_=tests_harness.knobs.networks.WithBuffers",
        "~model.net.hidden",
        "~model.net.dropout",
        "trainer.val_check_interval=2",
    ),
    "EMA, double precision": ("callbacks=ema", "trainer.precision=64-true"),
    "EMA, bf16-mixed, clipping": (
        "callbacks=ema",
        "trainer.precision=bf16-mixed",
        "trainer.gradient_clip_val=0.1",
    ),
    "early stopping": (
        "callbacks=early_stopping",
        "callbacks.early_stopping.patience=2",
        "callbacks.early_stopping.min_delta=10",
        "trainer.max_epochs=6",
        "trainer.val_check_interval=2",
    ),
    "top 2, early stopping, EMA": (
        "callbacks=[early_stopping,ema,top_k]",
        "callbacks.early_stopping.patience=2",
        "callbacks.checkpoint.save_top_k=2",
        "trainer.max_epochs=5",
        "trainer.val_check_interval=2",
    ),
    "channels last": (
        "channels_last=true",
        "model.net._target_=tests_harness.knobs.networks.Convolutions",
        "~model.net.in_features",
        "~model.net.hidden",
        "~model.net.dropout",
    ),
    "best 2": (
        "callbacks.checkpoint.save_top_k=2",
        "callbacks.checkpoint.filename='{step}'",
        "trainer.val_check_interval=2",
    ),
    "every kind of log": PLAIN,
    "a log per two steps, accumulation": (*PLAIN, "trainer.accumulate_grad_batches=2"),
    "a log per step, accumulation": (
        *PLAIN,
        "trainer.accumulate_grad_batches=2",
        "trainer.log_every_n_steps=1",
    ),
    "double precision": ("trainer.precision=64-true",),
    "gradients that wait": (
        "model._target_=tests_harness.faults.plain_module.TwoPaces",
        "callbacks.learning_rate=null",
    ),
    "gradients that wait, double precision": (
        "model._target_=tests_harness.faults.plain_module.TwoPaces",
        "callbacks.learning_rate=null",
        "trainer.precision=64-true",
    ),
    "accumulation that grows": (
        "+callbacks.grow._target_=pytorch_lightning.callbacks.GradientAccumulationScheduler",
        "+callbacks.grow.scheduling={0: 1, 1: 2}",
    ),
    "part of an epoch": ("trainer.limit_train_batches=3",),
    "what authors keep": (
        "model._target_=tests_harness.checkpoints.author.Keeping",
        "data._target_=tests_harness.checkpoints.author.KeepingData",
        "+callbacks.recorder._target_=tests_harness.checkpoints.author.Recorder",
    ),
    "all together": (
        "data.num_workers=2",
        "trainer.accumulate_grad_batches=2",
        "trainer.val_check_interval=2",
        "+callbacks.ema._target_=pytorch_lightning.callbacks.EMAWeightAveraging",
        "+callbacks.ema.decay=0.8",
        "callbacks.checkpoint.save_top_k=2",
        "callbacks.checkpoint.filename='{step}'",
    ),
}

OF_NEW_DATA = (
    "strategy=cpu",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "checkpoint.every_n_steps=1",
    "checkpoint.num_kept=1000",
)


def words_of_table(folder: Path) -> list[str]:
    """Numbers with gaps, and categories; steps are of 16 of 70 rows."""
    file = written(folder, rows(100).with_columns(kind=rows(100)["price"] % 3))
    words = ["experiment=table_classes", f"data.file={file}", "data.target=kind"]
    words += [f"data.cache_dir={folder}/cache"]
    return [*words, "data.categories=[zip]", "data.batch_size=16", "model.net.dropout=0.2"]


def words_of_arrays(folder: Path) -> list[str]:
    """Pictures of two channels, mapped, whose numbers are learnt."""
    rng = np.random.default_rng(0)
    for name, shape in (("inputs", (100, 2, 4, 4)), ("targets", (100,))):
        np.save(folder / f"{name}.npy", rng.standard_normal(shape).astype("float32"))
    words = [f"data.{name}={folder}/{name}.npy" for name in ("inputs", "targets")]
    return ["data=arrays", "model=regressor", "data.batch_size=16", *words]


def words_of_text(folder: Path) -> list[str]:
    """Made sentences, whose windows begin elsewhere in each epoch."""
    (folder / "text.txt").write_text(sentences(83, 1))
    words = [f"data.file={folder}/text.txt", "data.length=32", "data.batch_size=16"]
    words += [f"data.cache_dir={folder}/cache"]
    words += ["model.net.width=16", "model.net.num_heads=2", "model.net.num_layers=1"]
    words += ["trainer.limit_train_batches=4", "callbacks.text_samples.num_tokens=20"]
    return ["experiment=text", *words, "model.net.dropout=0.2"]


# By its name, what writes the data into a folder and gives the words of a run on them.
DATA: dict[str, Callable[[Path], list[str]]] = {
    "images, augmented": lambda folder: words_of_images(write_images(folder / "pets")),
    "images, RandAugment": lambda folder: words_of_images(
        write_images(folder / "pets"), "data.augmentation=randaugment", "data.cache=false"
    ),
    "table": words_of_table,
    "arrays": words_of_arrays,
    "text": words_of_text,
}


def words_on(name: str, folder: Path) -> list[str]:
    """The words of a run on data that are written into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return list(dict.fromkeys([*DATA[name](folder), *OF_NEW_DATA]))  # no word twice


def train(cfg: DictConfig) -> None:
    """Train in this process, in silence."""
    with contextlib.redirect_stdout(io.StringIO()):
        run.train(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)))


def sweep(
    name: str | Sequence[str], folder: Path, stride: int = 1
) -> Iterator[tuple[str, list[str]]]:
    """Yield for each safe point of a run what differs when it is resumed from there.

    Args:
        name: of ``CONFIGURATIONS``, or the words of another run.
        folder: of the runs.
        stride: 3 resumes from every third.
    """
    run_dir, reference_dir = folder / "run", folder / "reference"
    shutil.rmtree(folder, ignore_errors=True)
    run_dir.mkdir(parents=True)
    words = [*COMMON, *CONFIGURATIONS[name]] if isinstance(name, str) else name
    cfg = compose("train", [*words, f"run_dir={run_dir}"])
    train(cfg)
    run_dir.rename(reference_dir)
    reference = contents(reference_dir)
    for checkpoint in by_step(reference_dir / "checkpoints")[::stride]:
        # All that the run left stays, as if it had been killed at its very end and only this
        # checkpoint were whole.
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(reference_dir, run_dir, symlinks=True)
        steps = by_step(run_dir / "checkpoints")
        mine = steps.index(run_dir / "checkpoints" / checkpoint.name)
        for later in steps[mine + 1 :]:
            later.unlink()
        link_newest(steps[mine])
        cfg.resume = str(steps[mine])
        train(cfg)
        yield checkpoint.stem, differences(reference, contents(run_dir))
