"""How fast batches of text are read, beside numpy.take out of the same array.

    python benchmarks/text.py [--megabytes 100] [--length 256] [--batch-size 64]

Tokens per second of one process, for a corpus, for lines, and for packed lines, medians of
interleaved repeats. numpy.take copies as many bytes into the two arrays of 64-bit numbers that a
batch is, and does nothing else. The text is made, and lies in the file system's cache.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from harness.data.batches import Batch
from harness.text.datamodule import Text
from harness.text.sentences import sentences

REPEATS, NUM_BATCHES = 7, 50


def seconds(read: Callable[[list[int]], object], batches: list[list[int]]) -> float:
    started = time.perf_counter()
    for indices in batches:
        read(indices)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    length, batch_size = arguments.length, arguments.batch_size
    part = sentences(24_000, 0).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")
        path.write_bytes(part * (arguments.megabytes * 10**6 // len(part) + 1))
        started = time.perf_counter()
        contenders: dict[str, Callable[[list[int]], object]] = {}
        sizes: dict[str, int] = {}
        for name, settings in {
            "corpus": {"unit": "corpus"},
            "lines": {"unit": "lines"},
            "packed lines": {"unit": "lines", "packing": True},
        }.items():
            data = Text(
                file=str(path), length=length, cache_dir=folder, batch_size=batch_size, **settings
            )
            dataset = data.make_dataset("train")
            contenders[name], sizes[name] = dataset.__getitems__, len(dataset)
            print(f"{name}: encoded and opened in {time.perf_counter() - started:.1f} s")
            started = time.perf_counter()
        ids = dataset.tokens.ids
        places = np.arange(length)

        def take(indices: list[int]) -> None:
            starts = np.asarray(indices)[:, None] * length
            ids.take(starts + places).astype(np.int64)
            ids.take(starts + 1 + places).astype(np.int64)

        contenders = {"numpy.take": take} | contenders
        sizes["numpy.take"] = len(ids) // length - 1
        rng = np.random.default_rng(0)
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(REPEATS):
            for name, read in contenders.items():
                rows = rng.integers(sizes[name], size=(NUM_BATCHES, batch_size)).tolist()
                found[name].append(seconds(read, [Batch(row) for row in rows]))
    bare = statistics.median(found["numpy.take"])
    for name, values in found.items():
        median = statistics.median(values)
        speed = NUM_BATCHES * batch_size * length / median / 1e6
        print(f"{name:<14} {speed:8.0f} million places per second, {bare / median:.2f} of bare")


if __name__ == "__main__":
    main()
