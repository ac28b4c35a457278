"""Class folders of images: packing them, loading batches, and the memory of a run.

    python benchmarks/image_folders.py [packing loading memory] [--images 5000] [--json images.json]

Images are JPEGs of about 500x375 pixels, as noisy as photographs, and are packed for data.size=224.
Contenders take turns.

- packing: files per second, against the cores of this machine times what one of them decodes in a
  loop with Pillow, its `draft` included, to the same squares; and against such a loop on each core
  at once, which a machine that is busy with other things slows alike.
- loading: batches of 64, drawn at random, from the second epoch on: numpy.take from an array in
  memory; the packed path; the path without a cache, with workers, and the same with other decoders;
  and a Dataset of single images, as tutorials show it, with as many workers.
- memory: of a process that goes over two epochs, file pages left out, by the number of images.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import contest
import kornia_rs
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from harness.data.batches import Batch
from harness.images.cache import packed
from harness.images.datamodule import Images
from harness.images.dataset import FilePixels, ImageDataset
from harness.images.decoding import decode
from harness.images.finding import find_files
from harness.machine.limits import usable_cores

SIZE, PACKED, BATCH_SIZE = 224, 256, 64
MIB = 2**20


def write_images(root: Path, num: int, width: int = 500, height: int = 375) -> None:
    """Write JPEGs in ten classes; noise at several scales takes about the bytes of a photograph."""
    rng = np.random.default_rng(0)
    for i in range(num):
        path = root / str(i % 10) / f"{i:06d}.jpg"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        w, h = width + i % 25 - 12, height + i % 19 - 9
        pixels = np.zeros((h, w, 3), np.float32)
        for cell in (64, 16, 4, 1):
            shape = (-(-h // cell), -(-w // cell), 3)
            noise = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
            pixels += np.asarray(noise.resize((w, h), Image.Resampling.BILINEAR)) * (
                0.02 + 0.01 * cell
            )
        scaled = (pixels - pixels.min()) / (pixels.max() - pixels.min()) * 255
        Image.fromarray(scaled.astype(np.uint8)).save(path, quality=92)


def in_a_loop(paths: Sequence[str | Path]) -> float:
    """Files per second of one core."""
    started = time.perf_counter()
    for path in paths:
        decode(path, PACKED, 3)
    return len(paths) / (time.perf_counter() - started)


def in_loops_at_once(paths: list[Path]) -> float:
    """The same of as many processes as there are cores, which share nothing."""
    cores = usable_cores()
    program = "import image_folders as f, sys; print(f.in_a_loop(sys.stdin.read().split()))"
    loops = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        for _ in range(cores)
    ]
    with ThreadPoolExecutor(cores) as pool:
        shares = ["\n".join(map(str, paths[i::cores])) for i in range(cores)]
        said = pool.map(lambda loop, share: loop.communicate(share)[0], loops, shares)
    return sum(map(float, said))


def packing(root: Path, keeps_pixels: bool) -> float:
    """Files per second of all cores, until everything is on the disk."""
    files = find_files(root, "root")
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        started = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            packed(files, Path(folder), PACKED, 3, keeps_pixels=keeps_pixels)
        return len(files.names) / (time.perf_counter() - started)


def compare_packing(root: Path, repeats: int, figures: dict[str, Any]) -> None:
    paths = sorted(root.rglob("*.jpg"))
    turns = {
        "one core, in a loop": partial(in_a_loop, paths[: max(200, len(paths) // 5)]),
        "a loop on each core at once": partial(in_loops_at_once, paths),
        "packing": partial(packing, root, True),
        "packing, nothing kept": partial(packing, root, False),
    }
    found = contest.take_turns(turns, repeats)
    cores = usable_cores()
    ideal = [cores * value for value in found["one core, in a loop"]]
    at_once = found["a loop on each core at once"]
    titles = f"{f'of {cores} x one core':22} of the loops at once"
    print(f"\n{'packing':32} {'files/s (min - max)':28} {titles}")
    for name, values in found.items():
        ratios = f"{contest.ratio(values, ideal):22} {contest.ratio(values, at_once)}"
        print(f"{name:32} {contest.spread(values, 0):28} {ratios}")
    figures["packing"] = found


class SingleImages(Dataset[Any]):
    """What a tutorial shows: one image at a time, decoded by Pillow."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB").resize((PACKED, PACKED), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).movedim(2, 0)
        return pixels, int(self.paths[index].parent.name)


class OtherDecoder(FilePixels):
    """The path without a cache, with libjpeg-turbo through kornia_rs in place of Pillow."""

    def read(self, rows: Any) -> torch.Tensor:
        images = np.empty((len(rows), *self.shape), np.uint8)
        for i, name in enumerate(self.names[rows].tolist()):
            data = (self.root / os.fsdecode(name)).read_bytes()
            pixels = kornia_rs.io.decode_image_jpegturbo(data, "rgb")
            height, width, _ = pixels.shape
            side = min(height, width)
            y, x = (height - side) // 2, (width - side) // 2
            images[i] = self.resized(pixels[y : y + side, x : x + side])
        return torch.from_numpy(images)

    def resized(self, pixels: Any) -> Any:
        return Image.fromarray(pixels).resize(self.shape[:2], Image.Resampling.BILINEAR)


class OtherResize(OtherDecoder):
    """The same with its resize: twice as fast, as it looks at 4 pixels however many shrink."""

    def resized(self, pixels: Any) -> Any:
        contiguous = np.ascontiguousarray(pixels)
        return kornia_rs.imgproc.resize(contiguous, self.shape[:2], "bilinear")


def speed(batches: Iterable[Any], seconds: float = 4.0) -> float:
    """Images per second, once the first batches have come."""
    iterator = iter(batches)
    for _ in range(3):
        next(iterator)
    num, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds or num < 5 * BATCH_SIZE:
        batch = next(iterator)
        num += len(batch if isinstance(batch, (np.ndarray, torch.Tensor)) else batch[0])
    return num / spent


def endless(draw: Callable[[Any], Any], num: int) -> Iterable[Any]:
    rng = np.random.default_rng(0)
    while True:
        yield draw(rng.choice(num, BATCH_SIZE, replace=False))


def data_module(root: Path, cache_dir: Path, **settings: Any) -> Images:
    with contextlib.redirect_stdout(io.StringIO()):
        module = Images(
            str(root), cache_dir=str(cache_dir), size=SIZE, batch_size=BATCH_SIZE, **settings
        )
        module.dataset("train")
    return module


def compare_loading(root: Path, repeats: int, figures: dict[str, Any]) -> None:
    cache_dir, num_workers = root.parent / "cache", usable_cores()
    with_cache = data_module(root, cache_dir)
    without = data_module(root, cache_dir, cache=False, num_workers=num_workers)
    dataset: Any = with_cache.dataset("train")
    num = len(dataset)
    array = dataset.pixels.read(dataset.rows).numpy()  # in memory
    out = np.empty((BATCH_SIZE, *array.shape[1:]), np.uint8)
    plain: Any = without.dataset("train")
    files = without.source.files

    def with_decoder(kind: type[OtherDecoder]) -> Images:
        module = data_module(root, cache_dir, cache=False, num_workers=num_workers)
        pixels = kind(files.root, files.names, plain.pixels.shape)
        module.datasets["train"] = ImageDataset(
            pixels, plain.rows, plain.labels.numpy(), plain.num_draws
        )
        return module

    twins = {kind: with_decoder(kind) for kind in (OtherDecoder, OtherResize)}
    single = DataLoader(
        SingleImages([files.root / files.names[i] for i in plain.rows]),
        BATCH_SIZE,
        shuffle=True,
        num_workers=num_workers,
    )

    single_images = f"single images, {num_workers} workers"

    def by_workers(loader: Any) -> float:
        return speed(batch for _ in range(1000) for batch in loader)

    turns: dict[str, Callable[[], float]] = {
        "numpy.take": lambda: speed(
            endless(lambda rows: np.take(array, rows, axis=0), num), seconds=2
        ),
        "numpy.take into a buffer": lambda: speed(
            endless(lambda rows: np.take(array, rows, axis=0, out=out, mode="clip"), num), seconds=2
        ),
        "packed": lambda: speed(
            endless(lambda rows: dataset.__getitems__(Batch(rows.tolist())), num), seconds=2
        ),
        "packed, its loader": lambda: speed(with_cache.endless_loader(0, "train"), seconds=2),
        f"no cache, {num_workers} workers": lambda: by_workers(
            without.endless_loader(num_workers, "train")
        ),
        "libjpeg-turbo, Pillow's resize": lambda: by_workers(
            twins[OtherDecoder].endless_loader(num_workers, "train")
        ),
        "libjpeg-turbo, kornia_rs's": lambda: by_workers(
            twins[OtherResize].endless_loader(num_workers, "train")
        ),
        single_images: lambda: by_workers(single),
    }
    found = contest.take_turns(turns, repeats)
    bases = ("numpy.take", single_images, "libjpeg-turbo, Pillow's resize")
    titles = ("of numpy.take", "of single images", "of libjpeg-turbo")
    print(f"\n{'loading':32} {'images/s (min - max)':28} " + " ".join(f"{t:22}" for t in titles))
    for name, values in found.items():
        ratios = (f"{contest.ratio(values, found[base]):22}" for base in bases)
        print(f"{name:32} {contest.spread(values, 0):28} {' '.join(ratios)}")
    figures["loading"] = found


def memory_of(root: Path) -> float:
    """MiB of this process after two epochs, without what it shares with files."""
    module = data_module(root, root.parent / "cache", packed_size=SIZE)
    dataset: Any = module.dataset("train")
    for _ in range(2):
        for rows in np.random.default_rng(0).permutation(len(dataset)).tolist()[::BATCH_SIZE]:
            dataset.__getitems__(Batch([(rows + i) % len(dataset) for i in range(BATCH_SIZE)]))
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024 / MIB


def compare_memory(folder: Path, repeats: int, figures: dict[str, Any]) -> None:
    found: dict[str, list[float]] = {}
    for num in (5_000, 50_000):
        root = folder / f"small{num}"
        write_images(root, num, 32, 24)
        command = [sys.executable, __file__, "memory", "--measure", str(root)]
        for _ in range(repeats):
            result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found.setdefault(f"{num:,} images", []).append(float(result.stdout.split()[-1]))
    print(f"\n{'memory':32} MiB of a run (min - max)")
    for name, values in found.items():
        print(f"{name:32} {contest.spread(values, 0)}")
    figures["memory"] = found


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=5)
    parser.add_argument("parts", nargs="*", default=["packing", "loading", "memory"])
    parser.add_argument("--images", type=int, default=5000, help="JPEGs of about 500x375")
    parser.add_argument("--folder", type=Path, help="where they go, to be used again")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(memory_of(options.measure))
        return
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print(contest.machine())
        if {"packing", "loading"} & {*options.parts}:
            root = folder / f"jpegs{options.images}"
            write_images(root, options.images)
            size = sum(path.stat().st_size for path in root.rglob("*.jpg")) / options.images
            print(f"{options.images:,} JPEGs of {size / 1024:.0f} KiB")
        if "packing" in options.parts:
            compare_packing(root, options.repeats, figures)
        if "loading" in options.parts:
            compare_loading(root, options.repeats, figures)
        if "memory" in options.parts:
            compare_memory(folder, min(3, options.repeats), figures)
    contest.write(options.json, {k: json.loads(json.dumps(v)) for k, v in figures.items()})


if __name__ == "__main__":
    main()
