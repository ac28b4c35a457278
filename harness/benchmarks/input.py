"""Measure how many samples per second a loader gives.

    python benchmarks/input.py [--only NAME ...] [--repeats 5]

- images, small images: batches of decoded images, read from one file as the image example reads
  them, beside ``numpy.take`` from the same file and torch's loader with the same data set.
- samples: a data set that computes each sample in some tens of microseconds, in this process.
- workers: one that takes a millisecond for each, by two workers.

The library seeds the random generators for each sample. "without seeds" leaves that out.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import contest
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from harness.data.batches import BatchedDataset
from harness.data.loaders import rebuild_loader
from harness.data.shared_batches import SharedBatchSampler

NUM_FIRST = 10
BATCH_SIZE, SIDES = 64, {"images": 256, "small images": 73}  # for data.size=224 and 64
IMAGE_BYTES = 300_000_000  # of all images
WIDTH = 1024  # numbers of a sample
SAMPLES = {"samples": (20_000, 1, 0), "workers": (4_000, 25, 2)}  # number, steps, workers
EXAMPLES = Path(__file__).resolve().parents[2] / "src"


class Samples(Dataset[Tensor]):
    """Samples that each take some steps of tens of microseconds."""

    def __init__(self, num_samples: int, num_steps: int) -> None:
        self.values, self.num_steps = torch.rand(num_samples, WIDTH), num_steps

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        sample = self.values[index]
        for _ in range(self.num_steps):
            sample = (sample.sin() + self.values[index - 1]).cumsum(0).relu()
        return sample


def images(path: Path, side: int) -> Any:
    """Write images, and return the example's data set of them."""
    sys.path.insert(0, str(EXAMPLES))
    from project.data.images import ImageDataset

    num_images = IMAGE_BYTES // (3 * side**2)
    pixels = np.random.default_rng(0).bytes(num_images * 3 * side**2)
    np.save(path, np.frombuffer(pixels, np.uint8).reshape(num_images, side, side, 3))
    rows, labels = np.arange(num_images), np.zeros(num_images, dtype=np.int64)
    return ImageDataset(path, rows, labels, seed=0)


def torch_loader(dataset: Any, num_workers: int = 0) -> DataLoader[Any]:
    """Return torch's loader, which gives a ``BatchedDataset`` whole batches too."""
    collate = {"collate_fn": list} if isinstance(dataset, BatchedDataset) else {}
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers, **collate)


def shared_loader(dataset: Any, num_workers: int = 0, seeded: bool = True) -> DataLoader[Any]:
    """Return the loader that a run makes of torch's."""
    loader = torch_loader(dataset, num_workers)
    seeds = dataset if seeded else None
    batches = SharedBatchSampler(loader.batch_sampler, "train", dataset=seeds, reads_here=False)
    return rebuild_loader(loader, dataset, batch_sampler=batches, collate_fn=loader.collate_fn)


def take(path: Path) -> Iterator[Any]:
    """Yield batches of images by NumPy alone."""
    pixels = np.asarray(np.load(path, mmap_mode="r"))
    order = np.random.permutation(len(pixels))
    for start in range(0, len(order), BATCH_SIZE):
        yield np.take(pixels, order[start : start + BATCH_SIZE], axis=0)


def samples_per_second(make: Callable[[], Any]) -> float:
    """Read an epoch, and measure after its first batches, in which workers start."""
    for number, _ in enumerate(make()):
        if number == NUM_FIRST:
            started = time.perf_counter()
    return (number - NUM_FIRST) * BATCH_SIZE / (time.perf_counter() - started)


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=5)
    names = [*SIDES, *SAMPLES]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            num_workers, makes = 0, dict[str, Callable[[], Any]]()
            if name in SIDES:
                path = Path(folder, f"{SIDES[name]}.npy")
                dataset = images(path, SIDES[name])
                makes["numpy.take"] = partial(take, path)
            else:
                *sizes, num_workers = SAMPLES[name]
                dataset = Samples(*sizes)
            makes["torch's DataLoader"] = partial(torch_loader, dataset, num_workers)
            makes["the library"] = partial(shared_loader, dataset, num_workers)
            if name in SAMPLES:
                unseeded = partial(shared_loader, dataset, num_workers, seeded=False)
                makes["the library, without seeds"] = unseeded
            contenders = {who: partial(samples_per_second, make) for who, make in makes.items()}
            figures = contest.take_turns(contenders, options.repeats)
            contest.show(name, "samples/s", figures, decimals=0)


if __name__ == "__main__":
    main()
