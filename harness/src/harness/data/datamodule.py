"""The base class of a project's data modules.

In: data sets that subclasses build. Out: loaders of global batches. Next: ``wrap_loaders`` splits
these batches over the ranks.
"""

import sys
from abc import abstractmethod
from functools import cached_property
from typing import Any, Literal

import pytorch_lightning as pl
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from harness.compat.one_rank import num_devices, seen_as_it_is
from harness.data.batches import BatchedDataset
from harness.data.loaders import world_size_and_rank
from harness.devices import usable_cores
from harness.errors import UserError

MOST_WORKERS = 8  # ``num_workers="auto"`` starts at most this many per training process


class DataModule(pl.LightningDataModule):
    """Builds loaders whose global batches are the same under every strategy.

    Subclasses build the data sets. A ``BatchedDataset`` reads whole batches. The library reads any
    other data set sample by sample, seeds all generators for each, and calls ``collate``.

    Args:
        batch_size: samples per optimizer step, summed over all ranks.
        num_workers: worker processes that load data, per training process; 0 loads in the
            training process, and ``"auto"`` starts one per available core, at most 8.
        pin_memory: whether to keep batches in page-locked memory, which is copied to a GPU faster;
            ``"auto"`` does so only for CUDA.
        persistent_workers: whether to keep workers from one epoch to the next.
        prefetch_factor: batches that each worker keeps ready.
        drop_last: whether to leave out a last training batch smaller than ``batch_size``.
        max_samples_per_device: the most samples that fit on one device at once; a larger local
            batch is split into micro-batches, and their gradients are accumulated. ``None``
            splits nothing.
        augment: whether training samples are augmented; ``make_dataset`` may read it. It is
            false with ``trainer.overfit_batches``.
        seed: seeds the order of the training samples and their augmentation.
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

    def infer_facts(self) -> dict[str, Any]:
        """Return facts of the data that a model needs: sizes, class names, scales.

        The values must be JSON values. A config reads them as ``from_data.num_classes``. The run
        stores them in its folder, and every later use of its checkpoints reads them from there.
        """
        return {}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return the facts that the run's training stored, or else the facts of ``infer_facts``."""
        return self.infer_facts()

    @abstractmethod
    def make_dataset(self, split: str) -> Dataset[Any]:
        """Build the data set of ``split``: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.

        The data set must have a length and a fixed order, or be an ``IterableDataset``; see
        ``harness.data.streams``.
        """

    def dataset(self, split: str) -> Dataset[Any]:
        """Return the data set of ``split``; build it at the first call."""
        if split in self.datasets:
            return self.datasets[split]
        if self.trainer is not None and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            self.augment = False  # the same few samples in each epoch
        dataset: Any = self.make_dataset(split)
        if not isinstance(dataset, IterableDataset):
            name = type(self).__name__
            try:
                length = len(dataset)
            except TypeError as error:  # also if __len__ returns 24.0
                raise UserError(
                    f"{name}.make_dataset({split!r}) returned {type(dataset).__name__}, which has "
                    f"no length: {error}.\nReturn a data set with a __len__ that is a whole "
                    "number, or an IterableDataset."
                ) from error
            if length == 0:
                raise UserError(
                    f"The {split} data set of {name} has no samples. Check what "
                    f"make_dataset({split!r}) returns."
                )
        self.datasets[split] = dataset
        return self.datasets[split]

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of shuffled global batches."""
        trainer = self.trainer
        assert trainer is not None
        arguments = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if not isinstance(self.dataset("train"), IterableDataset):
            # Lightning steps the optimizer after this many batches.
            trainer.accumulate_grad_batches = self._num_micro_batches(trainer)
            # trainer.overfit_batches repeats the same few batches.
            shuffle = not trainer.overfit_batches  # type: ignore[attr-defined]  # set untyped
            arguments["shuffle"] = shuffle
        return self._loader("train", **arguments)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader that yields every sample once."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader that yields every sample once."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return a loader that yields every sample once."""
        return self._evaluation_loader("predict")

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        # Independent of the number of ranks: code that uses a whole batch gets the same batches.
        size = min(self.batch_size, self.max_samples_per_device or sys.maxsize)
        return self._loader(split, batch_size=size)

    def collate(self, samples: list[Any]) -> Any:
        """Collate samples to a batch; override it for samples of different sizes."""
        return default_collate(samples)

    def _num_micro_batches(self, trainer: pl.Trainer) -> int:
        """Return ``accumulate_grad_batches``, or more if micro-batches would be too large."""
        num_requested = trainer.accumulate_grad_batches
        if self.max_samples_per_device is None:
            return num_requested
        per_device = -(-self.batch_size // num_devices(trainer))
        num_needed = -(-per_device // self.max_samples_per_device)
        if num_needed > 1 and not trainer.lightning_module.automatic_optimization:
            raise UserError(
                f"data.max_samples_per_device={self.max_samples_per_device} splits a step into "
                f"{num_needed} batches, but with manual optimisation the module decides when to "
                "step.\nLeave out data.max_samples_per_device, or use a smaller data.batch_size."
            )
        return max(num_requested, num_needed)

    def _loader(self, split: str, **batches: Any) -> DataLoader[Any]:
        """Return a ``DataLoader`` of a split's global batches, which knows nothing of ranks."""
        dataset, trainer = self.dataset(split), self.trainer
        num_workers = self._num_workers_for(dataset)
        on_cuda = trainer is not None and trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            num_workers=num_workers,
            pin_memory=on_cuda if self.pin_memory == "auto" else self.pin_memory,
            persistent_workers=num_workers > 0 and self.persistent_workers,
            prefetch_factor=self.prefetch_factor if num_workers else None,
            collate_fn=identity_collate if isinstance(dataset, BatchedDataset) else self.collate,
            **batches,
        )

    def _num_workers_for(self, dataset: Dataset[Any]) -> int:
        """Return the number of data workers; ``auto`` divides the cores between the ranks."""
        if self.num_workers != "auto":
            return self.num_workers
        if self.trainer is None or isinstance(dataset, (BatchedDataset, IterableDataset)):
            return 0  # whole batches are fast to read, and a stream must split itself for workers
        with seen_as_it_is(self.trainer):
            cores = usable_cores() * self.trainer.num_nodes
        return min(MOST_WORKERS, cores // world_size_and_rank(self.trainer)[0])


def identity_collate(batch: Any) -> Any:
    """Return the batch unchanged: a ``BatchedDataset`` has already collated it."""
    return batch
