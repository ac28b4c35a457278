"""The sampler decides what is split: in every kind of step, each row once, nothing else."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness.errors import UserError
from harness.strategies.dp import DataParallelStrategy
from tests.strategies.parity import UPSTREAM_WARNINGS, trainer

pytestmark = UPSTREAM_WARNINGS
D = 6


def loader(num_samples: int, batch_size: int | None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(num_samples, D)), batch_size=batch_size)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(11, 8)

    def val_dataloader(self) -> Any:
        return [loader(5, 4), loader(6, 6)]

    def test_dataloader(self) -> Any:
        return loader(5, 5)

    predict_dataloader = test_dataloader


class Watched(pl.LightningModule):
    """Notes how calls were split in all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.sizes = nn.Linear(D, 4), list[tuple[str, list[int]]]()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y

    def call(self, name: str, x: Tensor) -> Tensor:
        y: Tensor = self(x)
        self.sizes.append((name, self.trainer.strategy.parallel_forwards[0].last_sizes))
        return y

    def training_step(self, batch: Any) -> Tensor:  # without its number
        x = batch[0]
        self.call("views", torch.cat([x, x]))
        return self.call("train", x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.call(f"val {dataloader_idx}", batch[0])

    def on_train_epoch_end(self) -> None:
        self.call("hook", torch.randn(7, D))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.call("test", batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.call("predict", batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


ONE_EPOCH: dict[str, Any] = {"max_epochs": 1, "max_steps": -1, "num_sanity_val_steps": 0}


def test_every_step_knows_its_batch_and_a_hook_does_not() -> None:
    module = Watched()
    t = trainer(DataParallelStrategy(), **ONE_EPOCH)
    t.fit(module, datamodule=Data())
    t.test(module, datamodule=Data(), verbose=False)
    t.predict(module, datamodule=Data())
    assert "forward" not in vars(module)  # given back at teardown
    assert module.sizes == [
        ("views", [8, 8]),
        ("train", [4, 4]),
        ("views", [3, 3]),
        ("train", [2, 1]),
        ("val 0", [2, 2]),
        ("val 0", []),  # one sample
        ("val 1", [3, 3]),
        ("hook", []),
        ("test", [3, 2]),
        ("predict", [3, 2]),
    ]


class Streamed(Data):
    def train_dataloader(self) -> Any:
        return map(tuple, torch.randn(3, 1, 4, D))  # batches without a sampler


def test_batches_that_nobody_counts_are_computed_by_one_device_which_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Watched()
    trainer(DataParallelStrategy(), **ONE_EPOCH).fit(module, Streamed())
    assert {tuple(sizes) for name, sizes in module.sizes if name == "train"} == {()}
    assert caplog.text.count("the number of samples in a batch is unknown") == 1


def test_calls_outside_of_steps_are_split_where_they_are_asked_to_be() -> None:
    module, strategy = Watched(), DataParallelStrategy()
    x = torch.randn(7, D)
    expected = module(x)

    class Calls(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen: list[int] = []
            handle = pl_module.net.register_forward_hook(
                lambda layer, given, _: seen.append(len(given[0]))
            )
            with strategy.splitting_calls(7):
                torch.testing.assert_close(pl_module(x), expected)
                assert seen == [4, 3]
                with pytest.raises(UserError, match="the batch has 7 samples"):
                    pl_module(x[:5])
            pl_module(x)
            assert seen == [4, 3, 7]
            handle.remove()

    trainer(strategy, callbacks=[Calls()], **ONE_EPOCH).fit(module, datamodule=Data())
