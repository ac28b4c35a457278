"""Measure training with the library, with a loop written by hand, and with plain Lightning.

    python benchmarks/overhead.py [--network mlp|cnn] [--repeats 7]

All contenders train the same network with AdamW and a one-cycle schedule on the same 60,000 images
of 28x28 bytes in batches of 128, and count loss and accuracy. After each epoch they evaluate loss,
accuracy and F1 on 10,000 images, and write the best checkpoint. Measured are the epochs after the
first, with their evaluations. The library runs as `train.py` does, with its default callbacks,
loggers and a progress bar, whose output is discarded.
"""

import os

os.environ |= {"FORCE_COLOR": "1", "TERM": "xterm-256color"}  # the progress bar draws

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
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from harness.command.compose import compose
from harness.files import atomic_write
from harness.training.build import build

BATCH_SIZE, LR, NUM_EPOCHS = 128, 1e-3, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Stopwatch(pl.Callback):
    """Count the steps per second of all epochs after the first."""

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
    """Train as an expert writes it: data indexed by batches, no synchronisation within an epoch.

    In a process group each rank trains on its local batch.
    """
    train, val = (
        [tensor.to(DEVICE) for tensor in images.make_images(num)] for num in (num_train, num_val)
    )
    torch.manual_seed(1)
    net: nn.Module = make().to(DEVICE)
    if dist.is_initialized():
        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = AdamW(net.parameters(), lr=LR, fused=True)
    num_steps = -(-num_train // BATCH_SIZE)
    scheduler = OneCycleLR(optimizer, LR, total_steps=num_epochs * num_steps)
    started, best = now(), -1.0
    for epoch in range(num_epochs):
        if epoch == 1:
            started = now()
        net.train()
        sums = torch.zeros(2, device=DEVICE)  # of losses, of correct predictions
        for inputs, labels in local_batches(train, torch.randperm(num_train, device=DEVICE)):
            logits = net(inputs)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            sums += torch.stack([loss.detach() * len(labels), right(logits, labels)])
        accuracy = evaluate(net.eval(), val, sums)
        if accuracy > best and not (dist.is_initialized() and dist.get_rank()):
            best = accuracy
            save({"net": net, "optimizer": optimizer, "scheduler": scheduler})
    return (num_epochs - 1) * num_steps / (now() - started)


def local_batches(data: list[Tensor], order: Tensor) -> Any:
    """Yield this rank's local batch of each batch."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for batch in order.split(BATCH_SIZE):
        rows = batch.tensor_split(world_size)[rank]
        yield data[0].index_select(0, rows).float().div_(255), data[1].index_select(0, rows)


def right(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.detach().argmax(1) == labels).sum()


@torch.inference_mode()
def evaluate(net: nn.Module, val: list[Tensor], sums: Tensor) -> float:
    """Return the accuracy; compute loss and F1 as well, and read the sums of training."""
    loss = torch.zeros(1, device=DEVICE)
    confusion = torch.zeros(images.NUM_CLASSES**2, device=DEVICE)
    for inputs, labels in local_batches(val, torch.arange(len(val[1]), device=DEVICE)):
        logits = net(inputs)
        loss += F.cross_entropy(logits, labels) * len(labels)
        cells = labels * images.NUM_CLASSES + logits.argmax(1)
        confusion += torch.bincount(cells, minlength=len(confusion))
    sums = torch.cat([sums, loss, confusion])
    if dist.is_initialized():
        dist.all_reduce(sums)
    confusion = sums[3:].view(images.NUM_CLASSES, images.NUM_CLASSES)
    hits = confusion.diagonal()
    f1 = (2 * hits / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)).mean()
    *_, num_right, _ = [float(score) for score in (*sums[:3], hits.sum(), f1)]
    return num_right / len(val[1])


def save(parts: dict[str, Any]) -> None:
    """Write a checkpoint atomically, and wait until it is on the disk."""
    with tempfile.TemporaryDirectory() as folder, atomic_write(Path(folder, "best.ckpt")) as file:
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)


def through_harness(
    network: str,
    num_train: int,
    num_val: int,
    num_epochs: int,
    words: Sequence[str] = (),
    watch: Sequence[pl.Callback] = (),
) -> float:
    """Train as `train.py` does, with other data and another network."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"trainer.max_epochs={num_epochs}", f"model.optimizer.lr={LR}", "test=false"]
        cfg = compose("train", [*settings, f"run_dir={folder}", *words], contest.ROOT / "conf")
        OmegaConf.set_struct(cfg, False)
        cfg.data = {"_target_": "images.ImageData", "num_train": num_train, "num_val": num_val}
        cfg.data.update({"batch_size": BATCH_SIZE, "seed": cfg.seed})
        cfg.model.net = {"_target_": f"images.{network}"}
        stopwatch = Stopwatch()
        trainer, model, datamodule = build(cfg)
        trainer.callbacks += [stopwatch, *watch]  # type: ignore[attr-defined]  # set untyped
        trainer.fit(model, datamodule)
    return stopwatch.steps_per_second


class PlainModule(pl.LightningModule):
    """A module as in a tutorial of Lightning."""

    def __init__(self, make: Callable[[], nn.Module], total_steps: int) -> None:
        super().__init__()
        self.net, self.total_steps = make(), total_steps
        self.train_accuracy = MulticlassAccuracy(images.NUM_CLASSES)
        self.val_accuracy = MulticlassAccuracy(images.NUM_CLASSES)
        self.val_f1 = MulticlassF1Score(images.NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.train_accuracy(logits, batch[1])
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.val_accuracy(logits, batch[1])
        self.val_f1(logits, batch[1])
        self.log("val/loss", F.cross_entropy(logits, batch[1]), prog_bar=True)
        self.log_dict({"val/accuracy": self.val_accuracy, "val/f1": self.val_f1})

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=LR)
        scheduler = OneCycleLR(optimizer, LR, total_steps=self.total_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def plain_lightning(
    make: Callable[[], nn.Module], num_train: int, num_val: int, num_epochs: int
) -> float:
    """Train with Lightning's defaults, and a data set of single samples."""
    pl.seed_everything(1, verbose=False)
    stopwatch, num_steps = Stopwatch(), -(-num_train // BATCH_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=num_epochs, default_root_dir=folder, callbacks=[stopwatch], devices=1
        )
        train, val = (
            TensorDataset(pixels.float() / 255, labels)
            for pixels, labels in (images.make_images(num_train), images.make_images(num_val))
        )
        loaders = DataLoader(train, BATCH_SIZE, shuffle=True), DataLoader(val, BATCH_SIZE)
        trainer.fit(PlainModule(make, num_epochs * num_steps), *loaders)
    return stopwatch.steps_per_second


def quietly(measure: Callable[[], float]) -> float:
    """Measure without output, and without garbage of another contender."""
    gc.collect()
    with open(os.devnull, "w") as nowhere, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            return measure()


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=7)
    parser.add_argument("--network", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--num-train", type=int, default=images.NUM_TRAIN)
    options = parser.parse_args()
    sizes = options.num_train, options.num_train // 6, NUM_EPOCHS
    make = getattr(images, options.network)
    contenders = {
        "by hand": partial(by_hand, make, *sizes),
        "the library": partial(through_harness, options.network, *sizes),
        "plain Lightning": partial(plain_lightning, make, *sizes),
    }
    turns = {name: partial(quietly, measure) for name, measure in contenders.items()}
    figures = contest.take_turns(turns, options.repeats)
    contest.show(options.network, "steps/s", figures, decimals=0)


if __name__ == "__main__":
    main()
