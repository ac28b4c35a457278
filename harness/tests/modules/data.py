"""Small data sets, in loaders as users write them: 37 and 29 samples in batches of 8."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from harness import DataModule

NUM_TRAIN, NUM_VAL, BATCH_SIZE = 37, 29, 8
NUM_WORDS, PADDING, IGNORED = 11, 0, -100


class Samples(Dataset[Any]):
    """Drawn once, from the size as a seed: training and validation differ."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.samples = [self.draw(index, generator) for index in range(size)]

    def draw(self, index: int, generator: torch.Generator) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    collate = None


class Flowers(Samples):
    """Six measures and one of three species, which are not equally frequent."""

    def draw(self, index: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, generator=generator, dtype=torch.float64)
        noise = 0.5 * torch.randn(3, generator=generator, dtype=torch.float64)
        return x, (x.view(3, 2).sum(1) + noise + torch.tensor([1.0, 0, -1])).argmax()


class Numbered(Flowers):
    """Measures, a species, and the sample's number."""

    def __getitem__(self, index: int) -> Any:
        return *self.samples[index], index


class Views(Samples):
    """Two noisy views of each thing, and its number."""

    def draw(self, index: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
        x, *noise = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        return x + 0.3 * noise[0], x + 0.3 * noise[1], index


class Sentences(Samples):
    """Token sequences with some tokens masked."""

    every = 1  # of so many sentences one has labels

    def draw(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        length = int(torch.randint(2, 10, (), generator=generator))
        ids = torch.randint(2, NUM_WORDS, (length,), generator=generator)
        masked = torch.rand(length, generator=generator) < 0.3
        masked[0] = True
        if index % self.every:
            masked[:] = False
        labels = ids.where(masked, torch.tensor(IGNORED))
        inputs = ids.where(~masked, torch.tensor(1))
        return {"ids": ids, "inputs": inputs, "labels": labels}

    @staticmethod
    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        padded = {"ids": PADDING, "inputs": PADDING, "labels": IGNORED}
        return {
            name: pad_sequence([s[name] for s in samples], batch_first=True, padding_value=value)
            for name, value in padded.items()
        }


class FewLabels(Sentences):
    """Most local batches have no label at all."""

    every = 5


class Series(Samples):
    """Sequences of 2 to 9 steps, with a target for the whole."""

    def draw(self, index: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        length = int(torch.randint(2, 10, (), generator=generator))
        x = torch.randn(length, 6, generator=generator, dtype=torch.float64)
        return x, x.sum(0)[:4]

    @staticmethod
    def collate(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        x = pad_sequence([x for x, _ in samples], batch_first=True)  # (B, T, 6)
        return x, torch.tensor([len(x) for x, _ in samples]), torch.stack([y for _, y in samples])


class Scans(Samples):
    """Sequences as long as a batch has samples, batch first."""

    def draw(self, index: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(BATCH_SIZE, 6, generator=generator, dtype=torch.float64)
        return x, x.cumsum(0)[:, :4]


class TimeFirst(Scans):
    """The same, stacked along dimension 1."""

    @staticmethod
    def collate(samples: list[Any]) -> list[Tensor]:
        return [torch.stack(part, 1) for part in zip(*samples, strict=True)]  # (T, B, ...)


class Graphs(Samples):
    """Graphs of three to seven nodes with five features and a label each; a target of the whole."""

    def draw(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        num_nodes = int(torch.randint(3, 8, (), generator=generator))
        x = torch.randn(num_nodes, 5, generator=generator, dtype=torch.float64)
        return {"x": x, "label": (x.sum(1) > 0).long(), "y": x.mean()}

    @staticmethod
    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        sizes = torch.tensor([len(s["x"]) for s in samples])
        return {
            "x": torch.cat([s["x"] for s in samples]),  # (nodes, 5)
            "label": torch.cat([s["label"] for s in samples]),  # (nodes,)
            "batch": torch.arange(len(samples)).repeat_interleave(sizes),  # (nodes,)
            "y": torch.stack([s["y"] for s in samples]),  # (B,)
        }


class GraphBatch:
    """What PyG's loader gives: an object with tensors, and no sequence."""

    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self.num_graphs = len(samples)
        self.tensors = Graphs.collate(samples)

    def __getattr__(self, name: str) -> Tensor:
        if name not in vars(self).get("tensors", ()):
            raise AttributeError(name)
        return self.tensors[name]

    def to(self, device: Any, non_blocking: bool = False) -> "GraphBatch":
        self.tensors = {k: v.to(device, non_blocking=non_blocking) for k, v in self.tensors.items()}
        return self


class GraphObjects(Graphs):
    collate = GraphBatch


class Data(pl.LightningDataModule):
    """A researcher's: the loaders of torch."""

    def __init__(self, dataset: str) -> None:
        super().__init__()
        self.dataset = globals()[dataset]

    def train_dataloader(self) -> Any:
        return self.loader(NUM_TRAIN, shuffle=True)

    def val_dataloader(self) -> Any:
        return self.loader(NUM_VAL)

    def loader(self, size: int, **settings: Any) -> DataLoader[Any]:
        dataset = self.dataset(size)
        return DataLoader(dataset, BATCH_SIZE, collate_fn=dataset.collate, **settings)


class DropsLast(Data):
    """Whole batches only, in training."""

    def train_dataloader(self) -> Any:
        return self.loader(NUM_TRAIN, shuffle=True, drop_last=True)


class TwoValidations(Data):
    def val_dataloader(self) -> Any:
        return [self.loader(NUM_VAL), self.loader(11)]


class TwoTasks(Data):
    """Two training loaders, of which the shorter one begins again."""

    def train_dataloader(self) -> Any:
        return {"a": self.loader(40, shuffle=True), "b": self.loader(24, shuffle=True)}


class OwnData(DataModule):
    """A user's data module, a subclass of the library's."""

    def __init__(self, dataset: str, batch_size: int = BATCH_SIZE, **settings: Any) -> None:
        super().__init__(batch_size, **settings)
        self.kind = globals()[dataset]

    def make_dataset(self, split: str) -> Dataset[Any]:
        return self.kind(NUM_TRAIN if split == "train" else NUM_VAL)

    def collate(self, samples: list[Any]) -> Any:
        return self.kind.collate(samples) if self.kind.collate else super().collate(samples)
