"""Loaders as users write them, without knowledge of this project."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from harness import DataModule
from tests.loaders import libraries
from tests.modules.classifiers import OneLoss

KINDS = (
    *("plain", "shuffled", "weighted", "bucketed", "by tokens", "endless", "several"),
    *("distributed", "of the module", "overridden", "longest", "own generator", "random split"),
    *("random collate", "moved at random", "stream in parts", "stream with state"),
    *("streams of a DataModule", "stream", "own iteration", "own order", "made batches"),
    *("several uneven", "empty", "subclass", "subclass, workers=2"),
    *("weighted, workers=2", "endless, workers=2", "own generator, workers=2"),
    *("random collate, workers=2", "stream in parts, workers=2", "stream with state, workers=2"),
)
NUM_SAMPLES, BATCH_SIZE = 37, 8


class Numbers(Dataset[Any]):
    """Sequences of 1 to 5 numbers, moved at random when they are read."""

    def __init__(self, size: int = NUM_SAMPLES, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
        self.lengths = torch.randint(1, 6, (size,), generator=generator).tolist()
        self.size, self.noise = size, noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        moved = torch.randn(()) + random.random() + np.random.rand()
        inputs = self.inputs[int(index)] + self.noise * moved
        inputs[self.lengths[int(index)] :] = 0
        return {"inputs": inputs, "target": self.inputs[int(index)].sum()}


class OwnGenerator(Numbers):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(noise=0)
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return sample | {"inputs": sample["inputs"] + 0.1 * self.generator.standard_normal()}


class ByLength(Sampler[int]):
    """Shuffled, then sorted by length within groups of 16."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.lengths)).tolist()
        for start in range(0, len(order), 16):
            yield from sorted(order[start : start + 16], key=self.lengths.__getitem__)

    def __len__(self) -> int:
        return len(self.lengths)


class ByNumberOfTokens(Sampler[list[int]]):
    """Batches of at most 20 tokens, which differ in size, in an order drawn by ``random``."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.batches: list[list[int]] = [[]]
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if sum(lengths[i] for i in self.batches[-1]) + lengths[index] > 20:
                self.batches.append([])
            self.batches[-1].append(index)

    def __iter__(self) -> Iterator[list[int]]:
        yield from random.sample(self.batches, len(self.batches))

    def __len__(self) -> int:
        return len(self.batches)


class Endless(Sampler[list[int]]):
    """No length, and a generator of its own that continues from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.generator.choice(NUM_SAMPLES, BATCH_SIZE, replace=False).tolist()


class WithoutLength(Sampler[list[int]]):
    """Ends, and does not say when."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from BatchSampler(range(NUM_SAMPLES), BATCH_SIZE, False)


class OfEachProcess(Sampler[list[int]]):
    """Draws from the system's randomness: every process gets others."""

    def __iter__(self) -> Iterator[list[int]]:
        system = random.SystemRandom()
        for _ in range(5):
            yield system.sample(range(NUM_SAMPLES), BATCH_SIZE)

    def __len__(self) -> int:
        return 5


class Followed(DataLoader[Any]):
    """Has arguments and an ``__iter__`` of its own, as loaders of graphs and time series do."""

    def __init__(self, size: int, data: Numbers, weights: list[float], **kwargs: Any) -> None:
        self.follow = "inputs"
        sampler = WeightedRandomSampler(weights, 40)
        super().__init__(data, size, sampler=sampler, collate_fn=self.together, **kwargs)

    def together(self, samples: list[Any]) -> Any:
        return {key: torch.stack([s[key] for s in samples]) for key in (self.follow, "target")}

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch | {"extra": 0}


class Stream(IterableDataset[Any]):
    """All samples in an order that ``random`` shuffles in each epoch."""

    part = slice(None)

    def __iter__(self) -> Iterator[Any]:
        samples, order = Numbers(), [*range(NUM_SAMPLES)]
        random.shuffle(order)
        for index in order[self.part]:
            yield samples[index]


class StreamInParts(Stream):
    """Keeps the contract of ``harness.data.streams``."""

    def read_part(self, part: int, num_parts: int) -> None:
        self.part = slice(part, None, num_parts)


class StreamWithState(IterableDataset[Any]):
    """Reads in order, in parts of its own making, and says where it is."""

    def __init__(self) -> None:
        self.place = 0

    def read_part(self, part: int, num_parts: int) -> None:
        """Do nothing: it splits itself."""

    def __iter__(self) -> Iterator[Any]:
        samples, info = Numbers(), get_worker_info()
        rank, num_ranks = 0, 1
        if torch.distributed.is_initialized():
            rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        mine = range(len(samples))[rank * num_workers + worker :: num_ranks * num_workers]
        while self.place < len(mine):
            self.place += 1
            yield samples[mine[self.place - 1]]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def loaders(kind: str, num_workers: int = 0) -> Any:
    """Return the loader of ``train_dataloader``."""
    data = Numbers()
    weights = [1.0 + i % 4 for i in range(NUM_SAMPLES)]

    def load(data: Any, batch_size: int | None = BATCH_SIZE, **how: Any) -> DataLoader[Any]:
        batch_size = 1 if "batch_sampler" in how else batch_size  # as torch wants it
        return DataLoader(data, batch_size, num_workers=num_workers, **how)

    made: dict[str, Any] = {
        "plain": lambda: load(data),
        "shuffled": lambda: load(data, shuffle=True),
        "moved at random": lambda: load(data, shuffle=True),
        "weighted": lambda: load(data, sampler=WeightedRandomSampler(weights, 40)),
        "bucketed": lambda: load(data, sampler=ByLength(data.lengths)),
        "subclass": lambda: Followed(BATCH_SIZE, data, weights, num_workers=num_workers),
        "by tokens": lambda: load(data, batch_sampler=ByNumberOfTokens(data.lengths)),
        "endless": lambda: load(data, batch_sampler=Endless()),
        "several": lambda: {
            "a": load(Numbers(40), shuffle=True, drop_last=True),
            "b": load(Numbers(24), shuffle=True),
        },
        "longest": lambda: CombinedLoader([load(Numbers(16)), load(Numbers(40))], "max_size"),
        "own generator": lambda: load(OwnGenerator(), shuffle=True),
        "random collate": lambda: load(data, collate_fn=masked),
        "random split": lambda: load(random_split(data, [0.8, 0.2])[0], shuffle=True),
        "empty": lambda: load(StreamInParts(), 1000, drop_last=True),
        "several uneven": lambda: [load(data, 6, shuffle=True), load(Numbers(20), 5, shuffle=True)],
        "distributed": lambda: (
            load(data, sampler=DistributedSampler(data))
            if torch.distributed.is_initialized()
            else load(data, shuffle=True)
        ),
        "stream in parts": lambda: load(StreamInParts()),
        "stream with state": lambda: load(StreamWithState()),
        "stream": lambda: load(Stream()),
        "own order": lambda: load(data, batch_sampler=OfEachProcess()),
        "made batches": lambda: load([*batches()], None, shuffle=True),
        "own iteration": lambda: Batches(),
        "webdataset": lambda: libraries.webdataset_loader(num_workers, splits=True),
        "webdataset whole": lambda: libraries.webdataset_loader(num_workers, splits=False),
    }
    return made[kind]()


def masked(samples: list[Any]) -> Any:
    """Collate, and mask at random."""
    batch = torch.utils.data.default_collate(samples)
    batch["inputs"] = batch["inputs"] * (torch.rand(batch["inputs"].shape) > 0.2)
    return batch


def batches() -> Iterator[Any]:
    data = Numbers(noise=0)
    for indices in BatchSampler(range(NUM_SAMPLES), BATCH_SIZE, False):
        yield torch.utils.data.default_collate([data[i] for i in indices])


class Batches:
    """No DataLoader at all."""

    def __iter__(self) -> Iterator[Any]:
        return batches()


class Data(pl.LightningDataModule):
    def __init__(self, kind: str, num_workers: int = 0) -> None:
        super().__init__()
        self.kind, self.num_workers = kind, num_workers

    def train_dataloader(self) -> Any:
        return loaders(self.kind, self.num_workers)

    def val_dataloader(self) -> Any:
        if self.kind == "endless":  # no length here either
            return DataLoader(Numbers(), batch_sampler=WithoutLength())
        return loaders(self.kind if self.kind == "by tokens" else "plain")

    def test_dataloader(self) -> Any:
        return DataLoader(Numbers(5), 2, sampler=RandomSampler(range(5)))

    def predict_dataloader(self) -> Any:
        return DataLoader(Numbers(13), 4)


class Overridden(DataModule):
    """The library's loader, with a method that the user has replaced."""

    def make_dataset(self, split: str) -> Dataset[Any]:
        return Numbers(13)

    def train_dataloader(self) -> Any:
        return loaders("shuffled")


class OfStreams(DataModule):
    """The library's loader, with data that have no length."""

    def make_dataset(self, split: str) -> Dataset[Any]:
        return StreamInParts()


class Module(OneLoss):
    """A loss that is a mean over samples, of all loaders that give a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self(batch["inputs"]) - batch["target"]).square().mean()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs).squeeze(1)  # (B,)
        return outputs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) and "a" in batch else [batch]
        parts = batch if isinstance(batch, (list, tuple)) else parts
        return torch.stack([self.loss(part) for part in parts if part is not None]).sum()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class MovedAtRandom(Module):
    """An augmentation of whole batches, on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            batch["inputs"] = batch["inputs"] + 0.1 * torch.randn(())
        return batch


class WithLoaders(Module):
    """A module that brings its own loaders."""

    def train_dataloader(self) -> Any:
        return loaders("shuffled")

    val_dataloader, test_dataloader = Data.test_dataloader, Data.test_dataloader
