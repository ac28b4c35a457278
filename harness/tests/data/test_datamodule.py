"""Loaders of a ``DataModule``: workers, batches that fit, and what is refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small.data import ArrayDataset
from torch.utils.data import Dataset, TensorDataset, random_split

from harness.data import datamodule
from harness.data.datamodule import DataModule
from harness.data.wrap_loaders import wrap_loaders
from harness.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")


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


@pytest.mark.parametrize(
    ("cores", "nodes", "ranks", "expected"),
    [(4, 1, 1, 4), (4, 1, 3, 1), (1, 1, 2, 0), (6, 2, 4, 3), (64, 1, 2, 8)],
)
def test_auto_is_as_many_workers_as_a_process_has_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, nodes: int, ranks: int, expected: int
) -> None:
    monkeypatch.setattr(datamodule, "usable_cores", lambda: cores)
    data = loaders(ranks=ranks, num_nodes=nodes)
    data.num_workers = "auto"
    assert data.val_dataloader().num_workers == expected
    monkeypatch.setattr(data, "make_dataset", lambda split: ArrayDataset(np.zeros(20)))
    data.datasets.clear()
    assert data.val_dataloader().num_workers == 0


def test_run_on_a_few_batches_does_not_augment() -> None:
    """``debug=overfit`` sets ``overfit_batches``, a setting that any data module can follow."""
    for overfit_batches in (0.0, 2):
        data = loaders(overfit_batches=overfit_batches)
        data.train_dataloader()
        assert data.augment == (not overfit_batches)


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
    shared = wrap_loaders(loader, data.trainer, "train", "Data.train_dataloader", seed=0)
    per_device = max(len(batch) for batch in shared.batch_sampler) / (devices // ranks)
    assert per_device <= fits
    assert max(len(batch) for batch in data.val_dataloader().batch_sampler) <= fits


def test_manual_optimisation_is_not_split() -> None:
    with pytest.raises(UserError, match="manual optimisation"):
        loaders(automatic=False, fits=3).train_dataloader()


def test_a_batch_that_leaves_a_process_without_a_sample_is_refused() -> None:
    data = loaders(ranks=12)
    with pytest.raises(UserError, match=r"Use Data\.train with batch_size=12 or more"):
        wrap_loaders(data.train_dataloader(), data.trainer, "train", "Data.train", seed=0)
