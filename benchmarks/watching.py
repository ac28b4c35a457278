"""What the callbacks that watch a run cost, and the worker tuner on images.

    python benchmarks/watching.py [--repeats 15] [--json watching.json]
    python benchmarks/watching.py --images

In every step: what the callback does itself, its hooks called as the loop calls them, and what
the loop spends on any callback, measured with twenty that do nothing. Beside the step of
the tiny MLP: 784-64-128-64-10 with BatchNorm, batches of 128, one thread. All of it interleaved,
in processor time of the training thread. Then the checks that are made now and then. --images
shows the table of measured workers for a data set that decodes PNG files.
"""

import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contest
import numpy as np
import pytorch_lightning as pl
import torch
from images import ImageData, mlp
from PIL import Image
from pytorch_lightning.trainer import call
from torch import Tensor, nn
from torch.utils.data import Dataset

from harness.data.datamodule import DataModule
from harness.data.measuring import Measured, candidates, knee, measure
from harness.machine.limits import usable_cores
from harness.upstream.step_overhead import skip_empty_hooks
from harness.watch.non_finite import NonFinite, first_bad_weight
from harness.watch.replicas import hashes
from harness.watch.throughput import Throughput

NUM_STEPS, BATCH_SIZE = 100, 128
NUM_IDLE = 20
# What the loop calls in every step.
HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward")
HOOKS += ("on_before_optimizer_step", "on_train_batch_end")


class Photographs(DataModule):
    """Decodes and crops."""

    def __init__(self, folder: Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder = folder

    def make_dataset(self, split: str) -> Dataset[Any]:
        return Decoded(sorted(self.folder.glob("*.png")))


class Decoded(Dataset[Any]):
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        image = Image.open(io.BytesIO(self.paths[index].read_bytes())).convert("RGB")
        left, top = torch.randint(0, 33, (2,)).tolist()
        pixels = np.asarray(image.resize((256, 256)).crop((left, top, left + 224, top + 224)))
        return torch.from_numpy(pixels.copy()).movedim(-1, 0).float() / 255


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class StepTimer(pl.Callback):
    """Processor seconds per step of an epoch, without its first ones."""

    seconds = 0.0

    def on_train_batch_start(self, *arguments: Any) -> None:
        if arguments[-1] == 5:
            self.start = time.thread_time()

    def on_train_batch_end(self, *arguments: Any) -> None:
        if arguments[-1] == NUM_STEPS - 1:
            self.seconds = (time.thread_time() - self.start) / (NUM_STEPS - 5)


def trainer_with(callbacks: list[pl.Callback]) -> pl.Trainer:
    """One epoch on the CPU, with nothing else."""
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )


def step_seconds(callbacks: list[pl.Callback]) -> float:
    """Train with these callbacks; what a step takes."""
    timer = StepTimer()
    trainer_with([*callbacks, timer]).fit(
        Module(), ImageData(NUM_STEPS * BATCH_SIZE, batch_size=BATCH_SIZE)
    )
    return timer.seconds


def seconds(function: Callable[[], object], times: int = 5) -> list[float]:
    function()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return found


def calling_seconds() -> float:
    """Seconds per step that the loop spends on one callback which does nothing."""
    trainer = trainer_with([pl.Callback() for _ in range(NUM_IDLE)])
    start = time.thread_time()
    for _ in range(1000):
        for hook in HOOKS:
            call._call_callback_hooks(trainer, hook)
    return (time.thread_time() - start) / 1000 / NUM_IDLE


def own_seconds() -> dict[str, float]:
    """Seconds per step of the callbacks' own hooks, after a short training that sets them up."""
    watching, guard = Throughput(), NonFinite("nowhere")
    strict = NonFinite("nowhere", every_gradient=True)
    trainer = trainer_with([watching, guard, strict])
    model = Module()
    trainer.fit(model, ImageData(NUM_STEPS * BATCH_SIZE, batch_size=BATCH_SIZE))
    loss = torch.ones((), requires_grad=True) * 2

    def throughput(k: int) -> None:
        watching.loader.when_asked()
        watching.loader.when_there()
        watching.on_train_batch_start(trainer, model, None, k)
        watching.on_train_batch_end(trainer, model, None, None, k)

    hooks: dict[str, Callable[[int], object]] = {
        "Throughput": throughput,
        "NonFinite": lambda _: guard.on_before_backward(trainer, model, loss),
        "NonFinite, every gradient": lambda _: strict.on_before_optimizer_step(
            trainer, model, trainer.optimizers[0]
        ),
    }
    found = {}
    for name, hook in hooks.items():
        for k in range(100):
            hook(k)
        start = time.thread_time()
        for k in range(1000):
            hook(k)
        found[name] = (time.thread_time() - start) / 1000
    return found


def checks() -> dict[str, list[float]]:
    """The checks that are not made in every step, on a small and on a large network."""
    cpu = torch.device("cpu")
    small = Module()
    large = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(25)))
    found = {}
    for name, network in (("64 thousand weights", small), ("25 million weights", large)):
        weights = list(network.parameters())
        found[f"hashes of the replica check, {name}"] = seconds(lambda w=weights: hashes(w, cpu))
        found[f"weights before a checkpoint, {name}"] = seconds(
            lambda n=network: first_bad_weight(n)
        )
    return found


def images() -> str:
    """A line per number of workers, on 512 PNG files of 320 x 320 pixels.

    Medians of three rounds; the numbers take turns, because the first ones read from the disk
    what the later ones find in memory.
    """
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(512):
            coarse = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((320, 320)).save(Path(folder, f"{i:04}.png"))
        data = Photographs(Path(folder), batch_size=32)
        numbers = [*candidates(usable_cores()), 2 * usable_cores()]  # more than there are cores
        rounds = [
            [measure(data.endless_loader(n, "train"), seconds=2.0) for n in numbers]
            for _ in range(3)
        ]
    found = [
        Measured(
            same[0].num_workers,
            statistics.median(m.seconds_per_batch for m in same),
            statistics.median(m.seconds_of_step for m in same),
        )
        for same in zip(*rounds, strict=True)
    ]
    lines = ["workers   batches/s   samples/s   ms of each step"]
    for m in found:
        speed = 1 / m.seconds_per_batch
        mark = "   <- more is not better" if m.num_workers == knee(found) else ""
        lines.append(
            f"{m.num_workers:7}   {speed:9.1f}   {speed * 32:9.0f}   "
            f"{m.seconds_of_step * 1000:15.2f}{mark}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=15)
    parser.add_argument("--images", action="store_true", help="tune the workers instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    if options.images:
        print(images())
        return
    skip_empty_hooks(trainer_with([]))  # as in every run
    step_seconds([])
    found: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        once = {"step": step_seconds([]), "being called": calling_seconds(), **own_seconds()}
        for name, value in once.items():
            found.setdefault(name, []).append(value * 1e6)
    step, called = (statistics.median(found[name]) for name in ("step", "being called"))
    print(contest.machine())
    print(f"a step of the tiny MLP: {step / 1e3:.2f} ms\n")
    print(f"{'':28} us per step (min - max)   share   with being called")
    for name, values in list(found.items())[1:]:
        median = statistics.median(values)
        total = "" if name == "being called" else f"{(median + called) / step:7.2%}"
        print(f"{name:28} {contest.spread(values, 1):24} {median / step:7.2%}   {total}")
    print(f"\n{'':55} ms (min - max)")
    for name, values in (now_and_then := checks()).items():
        print(f"{name:55} {contest.spread([value * 1e3 for value in values])}")
    contest.write(options.json, {"per step": found, "checks": now_and_then})


if __name__ == "__main__":
    main()
