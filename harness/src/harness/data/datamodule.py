"""The class from which a project's data modules inherit.

In: data sets that subclasses make. Out: ordinary loaders. Next: ``sharing.share`` rebuilds them.
"""

import sys
from abc import abstractmethod
from functools import cached_property
from typing import Any, Literal

import pytorch_lightning as pl
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from harness.data.batches import BatchedDataset
from harness.data.loaders import num_processes_and_rank
from harness.errors import UserError
from harness.machine import usable_cores
from harness.upstream.one_rank import num_devices, seen_as_it_is

MOST_WORKERS = 8  # of a process, that ``auto`` starts


class DataModule(pl.LightningDataModule):
    """Makes loaders whose batches are the same under every strategy; subclasses make data sets.

    A ``BatchedDataset`` reads whole batches. Any other data set is read sample by sample, with
    all generators seeded for each, and its samples go through ``collate``.

    Args:
        batch_size: samples per optimizer step, summed over all processes.
        num_workers: worker processes that load data, per training process; 0 loads in the
            training process, and ``"auto"`` takes the cores there are for it, at most 8.
        pin_memory: page-locked batches, faster to copy to a GPU; ``"auto"`` pins only for CUDA.
        persistent_workers: keep workers from one epoch to the next.
        prefetch_factor: batches that each worker keeps ready.
        drop_last: leave out a last training batch that is smaller than ``batch_size``.
        max_samples_per_device: the most samples that fit on one device at once; a larger share
            is split into batches whose gradients are accumulated. ``None`` splits nothing.
        augment: whether training samples are augmented; for ``make_dataset`` to look at.
        seed: decides the order of the training samples and their augmentation.
    """

    def __init__(
        self,
        batch_size: int,
        num_workers: int | Literal["auto"] = 0,
        pin_memory: bool | Literal["auto"] = "auto",
        persistent_workers: bool = True,
        prefetch_factor: int = 2,
        drop_last: bool = False,
        max_samples_per_device: int | None = None,
        augment: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.prefetch_factor = prefetch_factor
        self.drop_last = drop_last
        self.max_samples_per_device = max_samples_per_device
        self.augment = augment
        self.seed = seed
        self.datasets: dict[str, Dataset[Any]] = {}

    def learn(self) -> dict[str, Any]:
        """Return what a model needs to know before it is built: sizes, names of classes, scales.

        Values are plain, as JSON has them. They are stored with the run, and used wherever its
        checkpoints are. Settings such as ``from_data.num_classes`` take them.
        """
        return {}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return the result of ``learn``, or the facts of the run's training, which replace it."""
        return self.learn()

    @abstractmethod
    def make_dataset(self, split: str) -> Dataset[Any]:
        """Build the data set of ``split``: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.

        It has a length and an order that does not change, or it is an ``IterableDataset``: see
        ``harness.data.streams``.
        """

    def dataset(self, split: str) -> Dataset[Any]:
        """Return the data set of ``split``, built at its first use."""
        if split in self.datasets:
            return self.datasets[split]
        dataset: Any = self.make_dataset(split)
        if not isinstance(dataset, IterableDataset):
            name = type(self).__name__
            if not hasattr(dataset, "__len__"):
                raise UserError(
                    f"{name}.make_dataset({split!r}) returned {type(dataset).__name__}; it must "
                    "return a data set that has a length, or an IterableDataset."
                )
            if len(dataset) == 0:
                raise UserError(f"The {split} data set of {name} has no samples.")
        self.datasets[split] = dataset
        return self.datasets[split]

    def train_dataloader(self) -> DataLoader[Any]:
        """Give shuffled batches of ``batch_size`` samples over all processes."""
        trainer = self.trainer
        assert trainer is not None
        how = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if not isinstance(self.dataset("train"), IterableDataset):
            # Lightning takes a step after this many batches.
            trainer.accumulate_grad_batches = self._num_micro_batches(trainer)
            # Overfitting means the same few batches again and again.
            how["shuffle"] = not trainer.overfit_batches  # type: ignore[attr-defined]  # untyped
        return self._loader("train", **how)

    def val_dataloader(self) -> DataLoader[Any]:
        """Give every sample once."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Give every sample once."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Give every sample once."""
        return self._evaluation_loader("predict")

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        # The same under every strategy: what looks at a whole batch sees what one process would.
        size = min(self.batch_size, self.max_samples_per_device or sys.maxsize)
        return self._loader(split, batch_size=size)

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of samples; override it for samples of different sizes."""
        return default_collate(samples)

    def _num_micro_batches(self, trainer: pl.Trainer) -> int:
        """Return how many batches each process accumulates: as set, or more if they do not fit."""
        num_asked = trainer.accumulate_grad_batches
        if self.max_samples_per_device is None:
            return num_asked
        per_device = -(-self.batch_size // num_devices(trainer))
        num_needed = -(-per_device // self.max_samples_per_device)
        if num_needed > 1 and not trainer.lightning_module.automatic_optimization:
            raise UserError(
                f"data.max_samples_per_device={self.max_samples_per_device} splits a step, which a "
                "module with manual optimisation must do itself.\n"
                "Leave it out, or use a smaller data.batch_size."
            )
        return max(num_asked, num_needed)

    def _loader(self, split: str, **batches: Any) -> DataLoader[Any]:
        """Make an ordinary loader; the harness gives each process its share of what it reads."""
        dataset, trainer = self.dataset(split), self.trainer
        number = self._workers_for(dataset)
        on_cuda = trainer is not None and trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            num_workers=number,
            pin_memory=on_cuda if self.pin_memory == "auto" else self.pin_memory,
            persistent_workers=number > 0 and self.persistent_workers,
            prefetch_factor=self.prefetch_factor if number else None,
            collate_fn=as_it_is if isinstance(dataset, BatchedDataset) else self.collate,
            **batches,
        )

    def _workers_for(self, dataset: Dataset[Any]) -> int:
        """Return the number of workers; ``auto`` takes each core that a process can have."""
        if self.num_workers != "auto":
            return self.num_workers
        if self.trainer is None or isinstance(dataset, (BatchedDataset, IterableDataset)):
            return 0  # reading whole batches is fast, and a stream would have to split itself
        with seen_as_it_is(self.trainer):
            cores = usable_cores() * self.trainer.num_nodes
        return min(MOST_WORKERS, cores // num_processes_and_rank(self.trainer)[0])


def as_it_is(batch: Any) -> Any:
    """Return a batch that a ``BatchedDataset`` has collated."""
    return batch
