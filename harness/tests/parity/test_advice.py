"""Code that messages and docs advise trains the same weights on 1, 2 and 3 ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from harness import mean_over, sum_over
from harness.parity.parity_verdict import ADVICE
from harness.training.train import close_process_group
from tests.strategy_runs import in_processes
from tests.workers.trainer import small_trainer

SAME = 1e-9
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


def words(module: pl.LightningModule, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over the elements above a bound, and their number; some local batches have none."""
    kept = x > 1.0
    errors = (module(x) - x.roll(1, 1)).square()
    return (errors * kept).sum() / kept.sum().clamp(min=1), kept.sum()


def per_sample(module: pl.LightningModule, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y, reduction="none")


def compared(module: pl.LightningModule, x: Tensor, y: Tensor) -> Tensor:
    """A loss that compares each sample with all others."""
    embedded = module.all_gather(module(x), sync_grads=True).flatten(0, -2)
    labels = module.all_gather(y).flatten()
    distances = (embedded[:, None] - embedded[None]).square().sum(-1)
    return (distances * (labels[:, None] == labels[None])).mean() - (1 + distances).log().mean()


Loss = Callable[[Any, Tensor, Tensor], Tensor]
ADVISED: dict[str, list[Loss]] = {
    "mean_over(loss, number)": [
        lambda m, x, y: mean_over(*words(m, x, y)),
        lambda m, x, y: mean_over(
            F.cross_entropy(m(x), y, weight=CLASS_WEIGHTS), CLASS_WEIGHTS[y].sum()
        ),
        lambda m, x, y: mean_over(*words(m, x, y)) + per_sample(m, x, y).mean(),
    ],
    "sum_over(loss)": [
        lambda m, x, y: sum_over(per_sample(m, x, y).sum()),
        lambda m, x, y: sum_over(per_sample(m, x, y).sum() / 100),
        lambda m, x, y: sum_over(
            per_sample(m, x, y).sum() / m.all_gather(torch.tensor(len(x))).sum()
        ),
    ],
    "sum_over(sum, number)": [
        lambda m, x, y: sum_over(m(x).square().sum(), (x > 1.5).sum(), at_least=2.0),
    ],
    "self.all_gather(z, sync_grads=True).flatten(0, -2)": [compared],
    "loss / len(x)": [lambda m, x, y: per_sample(m, x, y).sum() / len(x)],
}
RIGHT = [(text, loss) for text, losses in ADVISED.items() for loss in losses]
ALONE = [losses[0] for text, losses in ADVISED.items() if "over" in text]  # have one kind of term


class Module(pl.LightningModule):
    def __init__(self, loss: Loss, is_even: bool) -> None:
        super().__init__()
        # Of 7 samples 2 processes get 4 and 3, and 3 get 3, 2 and 2; the last batch has 3.
        self.batch_size = 6 if is_even else 7
        torch.manual_seed(1)
        self.layer, self.loss = torch.nn.Linear(3, 3).double(), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(self, *batch)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(24, 3, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 3, (24,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=self.batch_size, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)  # Adam would hide a factor


def weights(loss: Loss, devices: int, is_even: bool = False, num_batches: int = 1) -> Tensor:
    """Return the weights after two epochs, with this number of batches per step."""
    module = Module(loss, is_even)
    trainer = small_trainer(devices, max_epochs=2, accumulate_grad_batches=num_batches)
    trainer.fit(module)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def train_all(devices: int, path: Path) -> None:
    found = [weights(loss, devices, is_even="gather" in text) for text, loss in RIGHT]
    found += [weights(loss, devices, num_batches=2) for loss in ALONE]
    torch.save(found, path)
    close_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Tensor]]:
    """The weights of each loss, by the number of processes."""
    path = tmp_path_factory.mktemp("advice") / "weights.pt"
    found = {}
    for devices in (1, 2, 3):
        in_processes(devices, train_all, devices, path)
        found[devices] = torch.load(path)
    return found


@pytest.mark.ci
def test_what_is_advised_does_not_depend_on_the_processes(trained: dict[int, list[Tensor]]) -> None:
    for i, (text, _) in enumerate(RIGHT):
        for devices in (2, 3):
            apart = (trained[devices][i] - trained[1][i]).abs().max()
            assert apart < SAME, (i, text, devices)


@pytest.mark.ci
def test_nor_on_the_batches_that_a_step_accumulates(trained: dict[int, list[Tensor]]) -> None:
    """Also where some of them have no token, or no object."""
    losses = [loss for _, loss in RIGHT]
    for i, loss in enumerate(ALONE, len(RIGHT)):
        for devices in (1, 2, 3):
            apart = (trained[devices][i] - trained[1][losses.index(loss)]).abs().max()
            assert apart < SAME, (i, devices)


def test_every_advice_of_messages_is_tried() -> None:
    assert set(ADVICE.values()) < ADVISED.keys()
