"""How many samples a split call has is what the sampler says, whatever the sizes are."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness.errors import UserError
from harness.exact.global_batches import GlobalBatches
from harness.strategies.dp import DataParallelStrategy
from harness.strategies.splitting import num_rows
from tests.strategies.test_comparison import B, D, linear, split_call
from tests.strategies.test_misuse import trainer
from tests.strategies.test_module_zoo import Net
from tests.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = [
    *UPSTREAM_WARNINGS,
    # Lightning's, of loaders and steps that a test leaves out.
    pytest.mark.filterwarnings("ignore:.*Skipping val loop"),
    pytest.mark.filterwarnings("ignore:You are using a custom batch sampler"),
]


def rows(*sizes: int) -> list[Tensor]:
    return [torch.ones(n, 3) for n in sizes]


def test_the_rows_of_a_call() -> None:
    for tensors, batch_sizes, found in (
        (rows(5, 8), (8,), 8),  # what comes first is not what counts
        (rows(5, 24), (8,), 24),  # three views
        (rows(5), (8,), 5),  # a selection; compared before it is split
        (rows(4), (8, 4), 4),  # of the second loader
        (rows(7), (1,), 1),  # one sample with 7 steps of time
        (rows(7), (8, 1), 7),
        (rows(0, 8), (8,), 8),
        (rows(5, 8), (), 5),  # nobody knows
        ([], (8,), 1),
    ):
        assert num_rows(tensors, batch_sizes) == found


def test_the_argument_that_does_not_fit_is_named() -> None:
    module = Net(lambda m, mask, x: m.net(x), **linear())
    with pytest.raises(
        UserError, match=r"Argument 1 of forward\(\) has shape \(5, 5\)(.|\n)*8 sam"
    ):
        split_call(module, torch.eye(5), torch.randn(B, D))


def test_rows_that_nobody_can_prove_run_on_one_device(caplog: pytest.LogCaptureFixture) -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    module = Net(lambda m, x: m.norm(m.net(x)), **linear(norm=norm))
    x = torch.randn(5, D)
    found, sizes = split_call(module, x)
    assert sizes == [5]
    assert torch.equal(found, module(x))
    assert "gets 5 rows, the batch has 8 samples" in caplog.text
    assert split_call(module, torch.randn(B, D))[1] == [4, 4]


class Batches(pl.LightningModule):
    """Notes how calls were split in all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.sizes = nn.Linear(D, 4), list[tuple[str, list[int]]]()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y

    def call(self, name: str, x: Tensor) -> Tensor:
        y: Tensor = self(x)
        forward = self.trainer.strategy.parallel_forwards[0]
        self.sizes.append((name, [*forward.batch_sizes, *forward.last_sizes]))
        return y

    def training_step(self, batch: Any) -> Tensor:  # without its number
        x = batch[0]
        self.call("views", torch.cat([x, x]))
        self.call("selected", x[: len(x) - 1])
        self.call("noise", torch.randn(7, D))
        return self.call("train", x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.call(f"val {dataloader_idx}", batch[0])

    def on_train_epoch_end(self) -> None:
        self.call("hook", torch.randn(6, D))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.call("test", batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.call("predict", batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(num_samples: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(num_samples, D)), batch_size=batch_size)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(11, 8)

    def val_dataloader(self) -> Any:
        return [loader(5, 4), loader(6, 6)]

    def test_dataloader(self) -> Any:
        return loader(5, 5)

    predict_dataloader = test_dataloader


def test_every_step_knows_its_batch_and_a_hook_does_not() -> None:
    module = Batches()
    settings = {"max_epochs": 1, "max_steps": -1, "num_sanity_val_steps": 0}
    t = trainer(DataParallelStrategy(), callbacks=[GlobalBatches(seed=0)], **settings)
    t.fit(module, datamodule=Data())
    t.test(module, datamodule=Data(), verbose=False)
    t.predict(module, datamodule=Data())
    assert module.sizes == [
        ("views", [8, 8, 8]),
        ("selected", [8, 4, 3]),
        ("noise", [8, 4, 3]),
        ("train", [8, 4, 4]),
        ("views", [3, 3, 3]),
        ("selected", [3, 1, 1]),
        ("noise", [3, 4, 3]),
        ("train", [3, 2, 1]),
        ("val 0", [4, 2, 2]),
        ("val 0", [1, 1]),
        ("val 1", [6, 3, 3]),
        ("hook", [3, 3]),
        ("test", [5, 3, 2]),
        ("predict", [5, 3, 2]),
    ]
