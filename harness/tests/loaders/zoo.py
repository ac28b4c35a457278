"""Loaders as their owners write them: they know nothing of this project."""

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
    """No length, and a generator of its own that goes on from epoch to epoch."""

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
    """All samples in an order that is shuffled anew by ``random``."""

    def __iter__(self) -> Iterator[Any]:
        samples = Numbers()
        order = list(range(len(samples)))
        random.shuffle(order)
        for index in self.of_this_part(order):
            yield samples[index]

    def of_this_part(self, order: list[int]) -> list[int]:
        return order


class StreamInParts(Stream):
    """Keeps the contract of ``harness.data.streams``, and its place where it can."""

    part, num_parts, place = 0, 1, 0

    def read_part(self, part: int, num_parts: int) -> None:
        self.part, self.num_parts = part, num_parts

    def of_this_part(self, order: list[int]) -> list[int]:
        return order[self.part :: self.num_parts]


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
    """What ``train_dataloader`` returns."""
    data, common = Numbers(), {"num_workers": num_workers}
    weights = [1.0 + i % 4 for i in range(NUM_SAMPLES)]
    made: dict[str, Any] = {
        "plain": lambda: DataLoader(data, BATCH_SIZE, **common),
        "shuffled": lambda: DataLoader(data, BATCH_SIZE, shuffle=True, **common),
        "moved at random": lambda: DataLoader(data, BATCH_SIZE, shuffle=True, **common),
        "weighted": lambda: DataLoader(
            data, BATCH_SIZE, sampler=WeightedRandomSampler(weights, 40), **common
        ),
        "bucketed": lambda: DataLoader(data, BATCH_SIZE, sampler=ByLength(data.lengths), **common),
        "subclass": lambda: Followed(BATCH_SIZE, data, weights, **common),
        "by tokens": lambda: DataLoader(
            data, batch_sampler=ByNumberOfTokens(data.lengths), **common
        ),
        "endless": lambda: DataLoader(data, batch_sampler=Endless(), **common),
        "several": lambda: {
            "a": DataLoader(Numbers(40), BATCH_SIZE, shuffle=True, drop_last=True, **common),
            "b": DataLoader(Numbers(24), BATCH_SIZE, shuffle=True, **common),
        },
        "longest": lambda: CombinedLoader(
            [DataLoader(Numbers(16), BATCH_SIZE), DataLoader(Numbers(40), BATCH_SIZE)], "max_size"
        ),
        "own generator": lambda: DataLoader(OwnGenerator(), BATCH_SIZE, shuffle=True, **common),
        "random collate": lambda: DataLoader(data, BATCH_SIZE, collate_fn=masked, **common),
        "random split": lambda: DataLoader(
            random_split(data, [0.8, 0.2])[0], BATCH_SIZE, shuffle=True, **common
        ),
        "empty": lambda: DataLoader(StreamInParts(), 1000, drop_last=True),
        "several uneven": lambda: [
            DataLoader(data, 6, shuffle=True),
            DataLoader(Numbers(20), 5, shuffle=True),
        ],
        "distributed": lambda: DataLoader(
            data,
            BATCH_SIZE,
            sampler=DistributedSampler(data) if is_distributed() else None,
            shuffle=None if is_distributed() else True,
        ),
        "stream in parts": lambda: DataLoader(StreamInParts(), BATCH_SIZE, **common),
        "stream with state": lambda: DataLoader(StreamWithState(), BATCH_SIZE, **common),
        "stream": lambda: DataLoader(Stream(), BATCH_SIZE, **common),
        "own order": lambda: DataLoader(data, batch_sampler=OfEachProcess()),
        "made batches": lambda: DataLoader(list(batches()), batch_size=None, shuffle=True),
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


def is_distributed() -> bool:
    return torch.distributed.is_initialized()


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
    """The harness's own, with a method of the owner's in place of its own."""

    def make_dataset(self, split: str) -> Dataset[Any]:
        return Numbers(13)

    def train_dataloader(self) -> Any:
        return loaders("shuffled")


class OfStreams(DataModule):
    """The harness's own, with data that have no length."""

    def make_dataset(self, split: str) -> Dataset[Any]:
        return StreamInParts()


class Module(pl.LightningModule):
    """A loss that is a mean over samples, and dropout in no layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        for parameter in self.net.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self(batch["inputs"]) - batch["target"]).square().mean()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs).squeeze(1)  # (B,)
        return outputs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) and "a" in batch else [batch]
        parts = batch if isinstance(batch, (list, tuple)) else parts
        parts = [part for part in parts if part is not None]
        return torch.stack([self.loss(part) for part in parts]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=len(batch["target"]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch), batch_size=len(batch["target"]))

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
