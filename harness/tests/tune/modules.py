"""An experiment of a user's: a module, and data whose samples take a while."""

import time
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from harness import DataModule

MOST_SAMPLES = 20  # of a step, that fit


class Net(pl.LightningModule):
    """Has an argument for its rate, and a schedule that looks at validation."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.net, self.lr = nn.Linear(6, 3), lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(10 * x), y)  # learns fastest far below a rate of 1
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_epoch_end(self) -> None:
        self.trainer.callback_metrics["val/loss"]  # no trial ends an epoch

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val/loss"}


class LargeNet(Net):
    """Does not fit with many samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > MOST_SAMPLES:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().training_step(batch, batch_idx)


class SmallBatches(Net):
    """Raises an error of its own where a batch is large."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > MOST_SAMPLES:
            raise ValueError("too many rows\nfor this loss")
        return super().training_step(batch, batch_idx)


class Stops(Net):
    def on_train_epoch_end(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.should_stop = batch_idx == 4
        return super().training_step(batch, batch_idx)


class HungryNet(Net):
    """Takes 4 MiB for each sample, and no time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.held = torch.empty(len(batch[0]), 2**20, device=self.device)
        return super().training_step(batch, batch_idx)


class Rates(Net):
    """Has two rates."""

    def __init__(self, lr: float, head: dict[str, float]) -> None:
        super().__init__(lr)


class BrokenNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0][:, :4]).sum()


class Interrupted(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise KeyboardInterrupt


class Measures(DataModule):
    """Six measures and one of three classes; each sample takes so many seconds to read."""

    def __init__(self, num_train: int = 100, seconds: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_train, self.seconds = num_train, seconds

    def make_dataset(self, split: str) -> Any:
        return Slow(self.num_train, self.seconds)


class Slow(TensorDataset):
    def __init__(self, num: int, seconds: float) -> None:
        x = torch.randn(num, 6, generator=torch.Generator().manual_seed(0))
        super().__init__(x, x[:, :3].argmax(1))
        self.seconds = seconds

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class OwnLoaders(Net):
    """Needs no data module."""

    def val_dataloader(self) -> Any:
        return DataLoader(Slow(100, 0.0), batch_size=10)

    def train_dataloader(self) -> Any:
        return DataLoader(Slow(100, 0.0), batch_size=10)


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Slow(60, 0.0))


class StreamOfRows(DataModule):
    """A stream, whose number of samples is unknown."""

    def make_dataset(self, split: str) -> Any:
        return Rows()
