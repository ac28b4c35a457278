import logging
import sys
from abc import abstractmethod
from typing import Any, Literal

import pytorch_lightning as pl
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, default_collate

from harness.data.batches import BatchedDataset
from harness.data.loading import collated, processes, rebuilt
from harness.data.measuring import best, candidates, measure
from harness.data.shared_batches import SharedBatchSampler
from harness.errors import UserError
from harness.machine.limits import usable_cores
from harness.processes.launch import global_rank

log = logging.getLogger(__name__)


def tell(line: str) -> None:
    """Say something about the data once, on the screen and in the log."""
    log.info("%s", line.strip())
    if global_rank() == 0:
        print(line, flush=True)


class DataModule(pl.LightningDataModule):
    """Makes loaders whose batches are the same under every strategy; subclasses make data sets.

    A ``BatchedDataset`` reads whole batches. Any other data set is read sample by sample, with
    all generators seeded for each, and its samples go through ``collate``.

    Args:
        batch_size: samples per optimizer step, summed over all processes.
        num_workers: worker processes that load data, per training process; 0 loads in the
            training process, and ``"auto"`` chooses by measuring for some seconds.
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
        self._facts: dict[str, Any] | None = None

    def learn(self) -> dict[str, Any]:
        """What is to be known before a model is built: sizes, names of classes, scales.

        Values are plain, as JSON has them. A run keeps them, and its checkpoints are used with
        what its training has learnt. Settings such as ``from_data.num_classes`` take them.
        """
        return {}

    @property
    def facts(self) -> dict[str, Any]:
        """What ``learn`` has found, here or as the run was trained."""
        if self._facts is None:
            self._facts = self.learn()
        return self._facts

    @facts.setter
    def facts(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    @abstractmethod
    def make_dataset(self, split: str) -> Dataset[Any]:
        """Build the data set of ``split``: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.

        It has a length and an order that does not change, or it is an ``IterableDataset``: see
        ``harness.data.streams``.
        """

    def dataset(self, split: str) -> Dataset[Any]:
        """The data set of ``split``, built at its first use."""
        if split not in self.datasets:
            found = self.datasets[split] = self.make_dataset(split)
            is_stream = isinstance(found, IterableDataset)
            if not is_stream and not hasattr(found, "__len__"):
                raise UserError(
                    f"{type(self).__name__}.make_dataset({split!r}) returned "
                    f"{type(found).__name__}; it must return a data set that has a length, or an "
                    "IterableDataset."
                )
            if not is_stream and len(found) == 0:  # type: ignore[arg-type]  # it has a length
                raise UserError(f"The {split} data set of {type(self).__name__} has no samples.")
        return self.datasets[split]

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of all processes, of which the harness gives each its share."""
        trainer = self.trainer
        assert trainer is not None
        if isinstance(self.dataset("train"), IterableDataset):
            return self._loader("train", self.batch_size, drop_last=self.drop_last)
        # Lightning takes a step after this many batches.
        trainer.accumulate_grad_batches = self._num_micro_batches(trainer)
        # Overfitting means the same few batches again and again.
        shuffle = not trainer.overfit_batches  # type: ignore[attr-defined]  # set untyped
        return self._loader("train", self.batch_size, shuffle=shuffle, drop_last=self.drop_last)

    def val_dataloader(self) -> DataLoader[Any]:
        """Every sample once."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Every sample once."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Every sample once."""
        return self._evaluation_loader("predict")

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of samples; override it for samples of different sizes."""
        return default_collate(samples)

    def choose_workers(self, split: str, num_ranks: int, num_nodes: int) -> int:
        """Measure and say how many workers serve one of so many processes; needs no trainer."""
        numbers = candidates(max(1, usable_cores() * num_nodes // num_ranks))
        found = measure(lambda number: self.endless_loader(number, split, num_ranks), numbers)
        chosen = best(found)
        speeds = ", ".join(f"{number}: {1 / seconds:.3g}" for number, seconds in found.items())
        tell(f"data.num_workers=auto chose {chosen} (batches per second with {speeds})")
        return chosen

    def endless_loader(self, num_workers: int, split: str, num_ranks: int = 1) -> DataLoader[Any]:
        """One process's share of batches, without end, for measurements; needs no trainer."""
        dataset = self.dataset(split)
        endless = RandomSampler(dataset, replacement=True, num_samples=2**62)  # type: ignore[arg-type]
        size = max(1, self.batch_size // num_ranks)
        loader = self._loader(split, size, num_workers, sampler=endless)
        batches: Any = loader.batch_sampler
        shared = SharedBatchSampler(batches, f"data of {split}", dataset=dataset, seed=self.seed)
        return rebuilt(loader, dataset, batch_sampler=shared, collate_fn=loader.collate_fn)

    def _num_micro_batches(self, trainer: pl.Trainer) -> int:
        """Batches per optimizer step of each process: as asked for, or more where fewer fit."""
        num_asked = trainer.accumulate_grad_batches
        if self.max_samples_per_device is None:
            return num_asked
        # Under dp and ddp2 a process drives several devices.
        num_devices = max(processes(trainer)[0], trainer.num_devices * trainer.num_nodes)
        per_device = -(-self.batch_size // num_devices)
        num_needed = -(-per_device // self.max_samples_per_device)
        if num_needed > 1 and not trainer.lightning_module.automatic_optimization:
            raise UserError(
                f"data.max_samples_per_device={self.max_samples_per_device} splits a step, which a "
                "module with manual optimisation must do itself.\n"
                "Leave it out, or use a smaller data.batch_size."
            )
        return max(num_asked, num_needed)

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        # The same under every strategy: what looks at a whole batch sees what one process would.
        return self._loader(split, min(self.batch_size, self.max_samples_per_device or sys.maxsize))

    def _workers_of_run(self, split: str) -> int:
        """Let the first process measure, with its share of the cores, while the others wait."""
        trainer, chosen = self.trainer, 0
        assert trainer is not None
        if trainer.is_global_zero:
            split = "train" if trainer.state.fn == "fit" else split
            chosen = self.choose_workers(split, processes(trainer)[0], trainer.num_nodes)
        return int(trainer.strategy.broadcast(chosen))

    def _loader(
        self, split: str, batch_size: int, num_workers: int | None = None, **batches: Any
    ) -> DataLoader[Any]:
        """An ordinary loader; the harness gives each process its share of what it reads."""
        dataset = self.dataset(split)
        if num_workers is None:
            if self.num_workers == "auto":
                is_stream = isinstance(dataset, IterableDataset)
                self.num_workers = 0 if is_stream else self._workers_of_run(split)
            num_workers = self.num_workers
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            batch_size=batch_size,
            num_workers=num_workers,
            pin_memory=on_cuda if self.pin_memory == "auto" else self.pin_memory,
            persistent_workers=num_workers > 0 and self.persistent_workers,
            prefetch_factor=self.prefetch_factor if num_workers else None,
            # A BatchedDataset returns collated batches.
            collate_fn=collated if isinstance(dataset, BatchedDataset) else self.collate,
            **batches,
        )
