"""The data and networks of overhead.py and ddp.py: as many images as MNIST, made of noise."""

from typing import Any

import torch
from torch import Tensor, nn

from harness import BatchedDataset, DataModule

NUM_TRAIN, NUM_CLASSES = 60_000, 10


def make_images(num_images: int) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 28, 28), uint8, and labels (N,)."""
    generator = torch.Generator().manual_seed(num_images)
    images = torch.randint(256, (num_images, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return images, torch.randint(NUM_CLASSES, (num_images,), generator=generator)


class Images(BatchedDataset):
    """Whole batches from memory."""

    def __init__(self, num_images: int) -> None:
        self.images, self.labels = make_images(num_images)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices)
        images = self.images.index_select(0, rows)  # three times as fast as images[rows]
        return images.float().div_(255), self.labels.index_select(0, rows)


class ImageData(DataModule):
    """The images as a data module of the library."""

    num_classes = NUM_CLASSES

    def __init__(self, num_train: int, num_val: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sizes = {"train": num_train, "val": num_val}

    def make_dataset(self, split: str) -> Images:
        return Images(self.sizes[split])


def mlp() -> nn.Module:
    """Build 784-64-128-64-10 with BatchNorm."""
    layers: list[nn.Module] = [nn.Flatten()]
    num_inputs = 28 * 28
    for width in (64, 128, 64):
        layers += [nn.Linear(num_inputs, width), nn.BatchNorm1d(width), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(num_inputs, NUM_CLASSES))


def cnn(width: int = 16) -> nn.Module:
    """Three convolutions; a step of 128 images takes tens of milliseconds on two cores."""
    layers: list[nn.Module] = []
    num_inputs = 1
    for channels in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(num_inputs, channels, 3, padding=1), nn.BatchNorm2d(channels)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        num_inputs = channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(num_inputs * 9, NUM_CLASSES))
