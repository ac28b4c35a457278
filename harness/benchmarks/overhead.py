"""Training through this project beside a loop written by hand, and beside plain Lightning.

    python benchmarks/overhead.py [--network mlp|cnn] [--repeats 7] [--json overhead.json]

All train the same network with AdamW and a one-cycle schedule on the same 60,000 images of 28x28
bytes in batches of 128, count the mean loss and the accuracy in training, evaluate loss,
accuracy and F1 on 10,000 images after each epoch, and write the best checkpoint. Counted are the
steps of the epochs after the first, and all the time that they take, evaluation included.

This project runs as `train.py` does, with its default callbacks, loggers and progress bar, which
draws for a terminal that throws it away.
"""

import os

os.environ |= {
    "FORCE_COLOR": "1",
    "TERM": "xterm-256color",
}  # the progress bar draws, though nobody looks

import contextlib
import gc
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import contest
import images
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from harness.command.compose import compose
from harness.run import build as run

BATCH_SIZE, LR = 128, 1e-3
CONF = contest.ROOT / "conf"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Stopwatch(pl.Callback):
    """The steps per second of all epochs after the first, if there are more than one.

    What a run does once, at its end, is left out: its last checkpoint, and what a device can reach.
    """

    steps_per_second = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch <= 1:
            self.first_step, self.started = trainer.global_step, now()

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        num_steps = trainer.global_step - self.first_step
        self.steps_per_second = num_steps / (now() - self.started)


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def by_hand(make: Callable[[], nn.Module], num_train: int, num_val: int, num_epochs: int) -> float:
    """A loop as an expert writes it: data indexed by batches, nothing read back until the end.

    After an epoch of better accuracy it writes a checkpoint, and waits until that is on the disk.
    In a process group each process takes its share of each batch.
    """
    in_group = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if in_group else (0, 1)
    (images_train, labels_train), (images_val, labels_val) = (
        [tensor.to(DEVICE) for tensor in images.make_images(num)] for num in (num_train, num_val)
    )
    torch.manual_seed(1)
    net: nn.Module = make().to(DEVICE)
    if in_group:
        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = AdamW(net.parameters(), lr=LR, fused=True)
    steps_per_epoch = -(-num_train // BATCH_SIZE)
    scheduler = OneCycleLR(optimizer, LR, total_steps=num_epochs * steps_per_epoch)
    started, best = now(), 0.0
    for epoch in range(num_epochs):
        if epoch == 1:
            started = now()
        net.train()
        loss_sum, num_right = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
        for batch in torch.randperm(num_train, device=DEVICE).split(BATCH_SIZE):
            indices = batch.tensor_split(world_size)[rank]
            inputs = images_train.index_select(0, indices).float().div_(255)
            labels = labels_train.index_select(0, indices)
            logits = net(inputs)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss_sum += loss.detach() * len(labels)
            num_right += (logits.detach().argmax(1) == labels).sum()
        net.eval()
        val_loss = torch.zeros((), device=DEVICE)
        confusion = torch.zeros(images.NUM_CLASSES**2, device=DEVICE)
        with torch.inference_mode():
            for batch in torch.arange(num_val, device=DEVICE).split(BATCH_SIZE):
                indices = batch.tensor_split(world_size)[rank]
                inputs = images_val.index_select(0, indices).float().div_(255)
                labels = labels_val.index_select(0, indices)
                logits = net(inputs)
                val_loss += F.cross_entropy(logits, labels) * len(labels)
                cells = labels * images.NUM_CLASSES + logits.argmax(1)
                confusion += torch.bincount(cells, minlength=len(confusion))
        sums = torch.cat([torch.stack([loss_sum, num_right, val_loss]), confusion])
        if in_group:
            dist.all_reduce(sums)
        confusion = sums[3:].view(images.NUM_CLASSES, images.NUM_CLASSES)
        right = confusion.diagonal()
        f1 = (2 * right / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)).mean()
        *_, num_right_val, _ = [float(score) for score in (*sums[:3], right.sum(), f1)]
        if num_right_val > best and rank == 0:
            best = num_right_val
            save({"net": net, "optimizer": optimizer, "scheduler": scheduler})
    return (num_epochs - 1) * steps_per_epoch / (now() - started)


def save(parts: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "best.part")
        with path.open("wb") as file:
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        path.rename(Path(folder, "best.ckpt"))


def through_project(
    network: str,
    num_train: int,
    num_val: int,
    num_epochs: int,
    overrides: Sequence[str] = (),
    watch: pl.Callback | None = None,
    **data: Any,
) -> float:
    """The default run of this project, with other data and another network."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"trainer.max_epochs={num_epochs}", f"model.optimizer.lr={LR}", "test=false"]
        cfg = compose("train", [*settings, f"run_dir={folder}", *overrides], CONF)
        OmegaConf.set_struct(cfg, False)
        cfg.data = {"_target_": "images.ImageData", "num_train": num_train, "num_val": num_val}
        cfg.data.update({"batch_size": BATCH_SIZE, "seed": cfg.seed, **data})
        cfg.model.net = {"_target_": f"images.{network}"}
        stopwatch = Stopwatch()
        callbacks = [stopwatch] if watch is None else [stopwatch, watch]
        trainer, model, datamodule = run.build(cfg)
        trainer.callbacks += callbacks  # type: ignore[attr-defined]  # set untyped
        trainer.fit(model, datamodule)
    return stopwatch.steps_per_second


class PlainModule(pl.LightningModule):
    """What a tutorial of Lightning shows."""

    def __init__(self, make: Callable[[], nn.Module], total_steps: int) -> None:
        super().__init__()
        self.net, self.total_steps = make(), total_steps
        for split in ("train", "val"):
            setattr(self, f"{split}_accuracy", MulticlassAccuracy(images.NUM_CLASSES))
        self.val_f1 = MulticlassF1Score(images.NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        logits = self.net(inputs)
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        logits = self.net(inputs)
        self.val_accuracy(logits, labels)
        self.val_f1(logits, labels)
        self.log("val/loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val/accuracy", self.val_accuracy)
        self.log("val/f1", self.val_f1)

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=LR)
        scheduler = OneCycleLR(optimizer, LR, total_steps=self.total_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def plain_lightning(
    make: Callable[[], nn.Module], num_train: int, num_val: int, num_epochs: int
) -> float:
    """Lightning's Trainer with its defaults, and a data set of single samples."""
    with tempfile.TemporaryDirectory() as folder:
        pl.seed_everything(1, verbose=False)
        stopwatch = Stopwatch()
        trainer = pl.Trainer(
            max_epochs=num_epochs, default_root_dir=folder, callbacks=[stopwatch], devices=1
        )
        trainer.fit(
            PlainModule(make, num_epochs * -(-num_train // BATCH_SIZE)),
            DataLoader(images.SingleImages(num_train), BATCH_SIZE, shuffle=True),
            DataLoader(images.SingleImages(num_val), BATCH_SIZE),
        )
    return stopwatch.steps_per_second


def quietly(measure: Callable[[], float]) -> float:
    """Measure with the screen thrown away and without another contender's rubbish."""
    gc.collect()
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return measure()


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=7)
    parser.add_argument("--network", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--num-train", type=int, default=images.NUM_TRAIN)
    parser.add_argument("--num-epochs", type=int, default=3)
    options = parser.parse_args()
    sizes = options.num_train, options.num_train // 6, options.num_epochs
    make = getattr(images, options.network)
    contenders = {
        "by hand": partial(by_hand, make, *sizes),
        "this project": partial(through_project, options.network, *sizes),
        "plain Lightning": partial(plain_lightning, make, *sizes),
    }
    turns = {name: partial(quietly, measure) for name, measure in contenders.items()}
    figures = contest.take_turns(turns, options.repeats)
    print(contest.machine())
    print(f"{options.network:20} {'steps/s (min - max)':28} of the loop by hand (min - max)")
    for name, values in figures.items():
        print(
            f"{name:20} {contest.spread(values, 0):28} {contest.ratio(values, figures['by hand'])}"
        )
    contest.write(options.json, figures)


if __name__ == "__main__":
    main()
