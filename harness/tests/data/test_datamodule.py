import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, random_split

from harness.data.batches import Batch
from harness.data.datamodule import DataModule
from harness.data.seeded_samples import SeededSamples
from harness.errors import UserError


class Random(Dataset[Any]):
    """Returns what the generators give."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))


def read(indices: list[int], epoch: int = 0, seed: int = 1) -> torch.Tensor:
    return torch.stack(SeededSamples(Random(), seed).__getitems__(Batch(indices, epoch)), dim=1)


def test_draws_belong_to_seed_epoch_and_sample() -> None:
    whole = read(list(range(10)))
    assert torch.equal(read([7, 2]), whole[[7, 2]])
    for other in (read(list(range(10)), epoch=1), read(list(range(10)), seed=2)):
        assert (other != whole).all()


def test_reading_leaves_the_generators_as_they_were() -> None:
    """Without workers, dropout draws from the same ones."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = Random()[0]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    read([3, 4])
    assert Random()[0] == expected


class Data(DataModule):
    def make_dataset(self, split: str) -> Dataset[Any]:
        everything = TensorDataset(torch.arange(20.0), torch.arange(20))
        return random_split(everything, [0.5, 0.5])[0]


def loaders(automatic: bool = True, **trainer: Any) -> Data:
    data = Data(batch_size=8, max_samples_per_device=trainer.pop("fits", None))
    strategy = SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": trainer.pop("ranks", 1), "rank": 0},
        root_device=torch.device("cpu"),
    )
    defaults = {"num_nodes": 1, "num_devices": 1, "accumulate_grad_batches": 1}
    defaults |= {"overfit_batches": 0.0, "strategy": strategy}
    defaults["lightning_module"] = SimpleNamespace(automatic_optimization=automatic)
    data.trainer = SimpleNamespace(**defaults | trainer)
    return data


def test_subsets_are_read_sample_by_sample() -> None:
    values, labels = next(iter(loaders().val_dataloader()))
    assert values.shape == labels.shape == (8,)


@pytest.mark.parametrize(
    ("ranks", "devices", "fits", "expected"),
    [(1, 1, 8, 1), (1, 1, 3, 3), (2, 2, 4, 1), (2, 2, 3, 2), (1, 2, 4, 1), (1, 2, 3, 2)],
)
def test_a_share_that_does_not_fit_is_accumulated(
    ranks: int, devices: int, fits: int, expected: int
) -> None:
    """``ranks=1, devices=2`` is dp: one process, two devices."""
    data = loaders(ranks=ranks, num_devices=devices, fits=fits)
    loader = data.train_dataloader()
    assert data.trainer.accumulate_grad_batches == expected
    per_device = max(len(batch) for batch in loader.batch_sampler) / (devices // ranks)
    assert per_device <= fits
    assert max(len(batch) for batch in data.val_dataloader().batch_sampler) <= fits


def test_manual_optimisation_is_not_split() -> None:
    with pytest.raises(UserError, match="manual optimisation"):
        loaders(automatic=False, fits=3).train_dataloader()
