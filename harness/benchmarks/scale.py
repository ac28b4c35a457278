"""Measure how time and memory grow with the size of data, networks, runs and folders.

    python benchmarks/scale.py [--only NAME ...] [--largest N] [--repeats 3]

Contenders take turns, each in a process of its own, after all imports. The tables show medians. An
exponent is that between the two largest sizes: 1.0 if ten times the size takes ten times as much.
MiB is the peak beyond the memory before the measurement.
"""

import atexit
import itertools
import logging
import math
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import contest
import images
import overhead
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from harness import compare
from harness.command.compose import compose
from harness.data.shared_batches import SharedBatchSampler
from harness.training.build import build

BATCH_SIZE, NUM_STEPS, NUM_EPOCHS, SMALL = 128, 20, 2, 10
LIBRARY, TORCH, LIGHTNING = "the library", "torch", "plain Lightning"
SOURCES = Path(__file__).resolve().parents[2] / "src"  # its data module of images is measured
RUN_FILES = ("config.yaml", "metrics.csv", "results.json", "record.json")


class Cost(NamedTuple):
    """The time and the peak memory of one measurement."""

    seconds: float
    mib: float


def cost_of(work: Callable[[], object]) -> Cost:
    """Measure a function."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the present memory
    before, started = status("VmRSS"), time.perf_counter()
    work()
    return Cost(time.perf_counter() - started, (status("VmHWM") - before) / 1024)


def status(name: str) -> int:
    """Return an entry of this process's status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def draw(size: int, contender: str, folder: Path, resumes: bool = False) -> Cost:
    """Shuffle samples and draw a batch: the first one, or the one in the middle of an epoch."""

    def work() -> None:
        if contender == "torch.randperm":
            torch.randperm(size)
            return
        batches: Any = BatchSampler(RandomSampler(range(size)), BATCH_SIZE, drop_last=False)
        middle = len(batches) // 2 if resumes else 0
        if contender == LIBRARY:
            batches = SharedBatchSampler(batches, "train", dataset=range(size))
            batches.start_at(0, middle, {})
            middle = 0  # the sampler begins there
        next(itertools.islice(batches, middle, None))

    return cost_of(work)


class Sized(pl.LightningModule):
    """A module with a number of parameters, entries of an attribute, and logged names."""

    def __init__(self, parameters: int, attributes: int, names: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self.table = {str(number): float(number) for number in range(attributes)}
        self.logged = [f"train/{number}" for number in range(names)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.weight[:SMALL] * batch[0].float().mean()).sum()
        for name in self.logged:
            self.log(name, loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(size: int, contender: str, folder: Path, kind: str) -> Cost:
    """Train some steps with a checkpoint per epoch, with a module of which one size grows."""
    sizes = {"parameters": SMALL, "attributes": 1, "names": 1, "ranks": 1} | {kind: size}
    num_ranks, num_samples = sizes.pop("ranks"), NUM_STEPS * BATCH_SIZE
    strategy = "ddp" if kind == "ranks" else "auto"
    root = folder / contender
    if contender == LIGHTNING:
        plain = pl.Trainer(
            max_epochs=NUM_EPOCHS, default_root_dir=root, devices=num_ranks, strategy=strategy
        )
        samples = TensorDataset(*images.make_images(num_samples))
        loader = DataLoader(samples, BATCH_SIZE // num_ranks, shuffle=True)
        return cost_of(lambda: plain.fit(Sized(**sizes), loader))
    words = [f"run_dir={root}", f"trainer.max_epochs={NUM_EPOCHS}", f"strategy={strategy}"]
    cfg = compose("train", [*words, f"trainer.devices={num_ranks}"], contest.ROOT / "conf")
    OmegaConf.set_struct(cfg, False)
    cfg.objective, cfg.callbacks.checkpoint.monitor = "train/0", "train/0"
    cfg.data = {"_target_": "images.ImageData", "num_train": num_samples, "num_val": 1}
    cfg.data.update({"batch_size": BATCH_SIZE, "seed": cfg.seed})
    cfg.model = {"_target_": "scale.Sized", **sizes}
    trainer, model, data = build(cfg)
    return cost_of(lambda: trainer.fit(model, data))


@cache
def first_run() -> Path:
    """Train a run, of which the others are copies."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    words = [f"output_dir={folder}", "name=first", "trainer.max_epochs=5", "data.num_train=512"]
    subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=contest.ROOT,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return next(Path(folder, "first").iterdir())


def make_runs(size: int, folder: Path) -> None:
    """Copy a run, with another seed and rate in each config."""
    config = (first_run() / "config.yaml").read_text()
    for number in range(size):
        (run := folder / str(number)).mkdir()
        for name in RUN_FILES[1:]:
            shutil.copy(first_run() / name, run)
        changed = config.replace("lr: 0", f"lr: {number}", 1).replace("seed: ", f"seed: {number}")
        (run / RUN_FILES[0]).write_text(changed)


def list_runs(size: int, contender: str, folder: Path, what: str) -> Cost:
    """List runs, or write a report of them."""
    if contender == LIBRARY:
        words = [what, str(folder)] + ["-o", f"{folder}/report.html"] * (what == "report")
        return cost_of(lambda: compare.main(words))
    return cost_of(lambda: [path.read_bytes() for path in folder.glob("*/*.*")])


def make_files(size: int, folder: Path) -> None:
    """Make empty image files in a thousand class folders or fewer."""
    num_classes = min(1000, size // SMALL)
    for number in range(num_classes):
        (folder / str(number)).mkdir()
    for number in range(size):
        os.close(os.open(folder / str(number % num_classes) / f"{number}.jpg", os.O_CREAT))


def find_files(size: int, contender: str, folder: Path) -> Cost:
    """Find image files, and read their classes."""
    sys.path.insert(0, str(SOURCES))
    from project.data.image_files import find_images, read_folders

    if contender == LIBRARY:
        return cost_of(lambda: read_folders(find_images(folder, "data.root"), folder))
    return cost_of(lambda: [sorted(files) for *_, files in os.walk(folder)])


class Scale(NamedTuple):
    """A measurement, its sizes and contenders, and the function that prepares its folder."""

    measure: Callable[[int, str, Path], Cost]
    sizes: Sequence[int]
    contenders: Sequence[str]
    prepare: Callable[[int, Path], None] = lambda size, folder: None


def tens(first: int, last: int) -> list[int]:
    """Return powers of ten."""
    return [10**power for power in range(first, last + 1)]


def growing(kind: str, sizes: Sequence[int]) -> Scale:
    return Scale(partial(train, kind=kind), sizes, (LIBRARY, LIGHTNING))


ORDER, FILES = (LIBRARY, TORCH, "torch.randperm"), (LIBRARY, "reading the bytes")
SCALES = {
    "samples": Scale(draw, tens(3, 8), ORDER),
    "resume": Scale(partial(draw, resumes=True), tens(3, 8), ORDER),
    "parameters": growing("parameters", tens(4, 9)),
    "attributes": growing("attributes", tens(0, 6)),
    "names": growing("names", tens(0, 3)),
    "ranks": growing("ranks", (1, 2, 4, 8)),
    "ls": Scale(partial(list_runs, what="ls"), tens(1, 4), FILES, make_runs),
    "report": Scale(partial(list_runs, what="report"), tens(1, 3), FILES, make_runs),
    "files": Scale(find_files, tens(2, 6), (LIBRARY, "os.walk"), make_files),
}


def measure_rank(rank: int, num_ranks: int, port: int, measure: Callable[[], Cost]) -> Cost:
    """Measure in this process, which is a rank as torchrun starts it."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    if num_ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["TORCHELASTIC_RUN_ID"] = "benchmark"
    return overhead.quietly(measure)


def run(measure: Callable[[], Cost], num_ranks: int) -> Cost:
    """Measure in a process of its own, or in one for each rank, and return rank 0's cost."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(num_ranks, multiprocessing.get_context("fork")) as pool:
        one = partial(measure_rank, num_ranks=num_ranks, port=port, measure=measure)
        cost, *_ = pool.map(one, range(num_ranks))
        return cost


def measure_scale(name: str, sizes: Sequence[int], repeats: int) -> dict[str, list[list[Cost]]]:
    """Print each measurement, and return them by contender and size."""
    scale = SCALES[name]
    costs: dict[str, list[list[Cost]]] = {contender: [] for contender in scale.contenders}
    for size in sizes:
        for by_size in costs.values():
            by_size.append([])
        with tempfile.TemporaryDirectory() as folder:
            scale.prepare(size, Path(folder))
            for turn, contender in itertools.product(range(repeats), costs):
                shutil.rmtree(Path(folder, contender), ignore_errors=True)  # of the turn before
                measure = partial(scale.measure, size, contender, Path(folder))
                cost = run(measure, size if name == "ranks" else 1)
                costs[contender][-1].append(cost)
                text = f"{contender} {cost.seconds:.3g} s, {cost.mib:,.0f} MiB"
                print(f"turn {turn + 1} of {repeats}: {size:,}: {text}", flush=True)
    return costs


def exponent(sizes: Sequence[int], values: Sequence[float]) -> str:
    """Return the exponent between the two largest sizes."""
    if len(values) < 2 or min(values[-2:]) <= 0:
        return ""
    return f"{math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2]):.2f}"


def show(name: str, sizes: Sequence[int], costs: dict[str, list[list[Cost]]]) -> None:
    """Print a table: for each contender the seconds and the MiB at each size."""
    print(f"\n| {name} | {' | '.join(f'{size:,}' for size in sizes)} | exponent |")
    print("|---" * (len(sizes) + 2) + "|")
    for unit, position in (("seconds", 0), ("MiB", 1)):
        for contender, by_size in costs.items():
            values = [[cost[position] for cost in turns] for turns in by_size]
            medians = [*map(statistics.median, values)]
            cells = " | ".join(f"{value:,.3g}" for value in medians)
            print(f"| {contender}, {unit} | {cells} | {exponent(sizes, medians)} |")
            names = [f"{contender}, {size}" for size in sizes]
            contest.record(name, unit, dict(zip(names, values, strict=True)))
    print(flush=True)


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=3)
    parser.add_argument("--only", nargs="+", choices=SCALES, default=[*SCALES])
    parser.add_argument("--largest", type=int, default=10**8)
    parser.add_argument("--num-sizes", type=int, help="measure this many of the smallest sizes")
    options = parser.parse_args()
    for name in options.only:
        print(f"\n{name}", flush=True)
        sizes = [size for size in SCALES[name].sizes if size <= options.largest][
            : options.num_sizes
        ]
        show(name, sizes, measure_scale(name, sizes, options.repeats))


if __name__ == "__main__":
    main()
