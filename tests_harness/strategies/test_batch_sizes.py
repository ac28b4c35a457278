"""How many samples a split call has is what the sampler says, whatever the sizes are."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from harness.errors import UserError
from harness.exact.global_batches import GlobalBatches
from harness.strategies.dp import DataParallelStrategy
from harness.strategies.splitting import num_rows
from tests_harness.strategies.test_comparison import B, D, linear, split_call
from tests_harness.strategies.test_misuse import trainer
from tests_harness.strategies.test_module_zoo import Net
from tests_harness.strategies.upstream_warnings import UPSTREAM_WARNINGS

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


def test_a_selection_of_the_samples_is_split_where_rows_prove_to_be_samples() -> None:
    assert split_call(Net(lambda m, x: m.net(x), **linear()), torch.randn(5, D))[1] == [3, 2]
    with pytest.raises(UserError, match="does not treat each row by itself"):
        split_call(Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(D, 4)), torch.randn(5, B, D))


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

    def __init__(self, takes_index: bool = True) -> None:
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


class Several(Batches):
    def training_step(self, batch: Any) -> Tensor:
        for name, (x,) in batch.items():
            loss = self.call(name, x).square().mean()
        return loss


def test_a_batch_of_several_loaders_has_several_sizes() -> None:
    module = Several()
    t = trainer(DataParallelStrategy(), max_steps=2, callbacks=[GlobalBatches(seed=0)])

    class Two(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return {"a": loader(16, 8), "b": loader(12, 4)}

    t.fit(module, datamodule=Two())
    assert module.sizes[:2] == [("a", [8, 4, 4, 4]), ("b", [8, 4, 2, 2])]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter((row,) for row in torch.randn(12, D))


class OneLine(Batches):
    def training_step(self, batch: Any) -> Tensor:
        return self.call("train", batch[0]).square().mean()


def test_the_samples_of_a_stream_are_those_that_were_collated() -> None:
    module = OneLine()
    t = trainer(DataParallelStrategy(), max_steps=2, callbacks=[GlobalBatches(seed=0)])

    class Streams(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(Stream(), batch_size=8)

    t.fit(module, datamodule=Streams())
    assert module.sizes[:2] == [("train", [8, 4, 4]), ("train", [4, 2, 2])]


class TimeFirst(pl.LightningModule):
    """Reads (T, B, D), which one device takes for what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(D, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(x)[0]
        return y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].unsqueeze(0).repeat(self.num_steps, 1, 1)  # (T, B, D)
        return F.mse_loss(self.head(self(x)), torch.zeros(*x.shape[:2], 4))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_time_first_is_refused_at_the_first_step_whatever_its_length() -> None:
    for num_steps in (5, 8, 16):
        module = TimeFirst()
        module.num_steps = num_steps
        t = trainer(DataParallelStrategy(), callbacks=[GlobalBatches(seed=0)])
        with pytest.raises(UserError, match="batch_first=True"):
            t.fit(module, datamodule=Data())
