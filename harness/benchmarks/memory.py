"""Memory of a run and its data workers as the data set grows; and of a run as it goes on.

    python benchmarks/memory.py [--repeats 3] [--json memory.json]
    python benchmarks/memory.py --steps 10000 [--repeats 3]

One epoch with two workers, for data sets of several sizes. A worker's own memory is what it does
not share with the training process (USS); it must not grow with the data. Two data sets: tensors,
as this project's, and a Python list with one object per image, whose reference counts make each
worker copy what it reads: it shows that the measurement would see a copy. Linux only.

With --steps: the memory of a tiny network's run, with all that a run has, beside the loop by
hand: at a tenth of the steps and at the last of them. Neither should grow.
"""

import argparse
import json
import resource
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import contest
import images
import overhead
import pytorch_lightning as pl
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

NUM_IMAGES = (20_000, 80_000, 320_000)
TARGETS = {"tensors": "images.ImageData", "list of objects": "memory.ListedData"}
MIB = 2**20
STEPS_PER_EPOCH = 400


class ListedImages(Dataset[Any]):
    """An object per image, and one per label."""

    def __init__(self, num_images: int) -> None:
        tensors = images.Images(num_images)
        self.items = [
            (image.clone(), int(label))
            for image, label in zip(tensors.images, tensors.labels, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        image, label = self.items[index]
        return image.float() / 255, label


class ListedData(images.ImageData):
    def make_dataset(self, split: str) -> Any:
        return ListedImages(self.sizes[split])


class WorkerMemory(pl.Callback):
    """Watch the largest private memory of any worker, while all processes share the data."""

    peak = 0

    def on_train_start(self, *_: Any) -> None:
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def on_train_end(self, *_: Any) -> None:
        self.stopped.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.stopped.wait(0.05):
            for children in Path("/proc/self/task").glob("*/children"):
                for pid in children.read_text().split():
                    self.peak = max(self.peak, private_bytes(pid))


def private_bytes(pid: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has just ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def measure(target: str, num_images: int) -> dict[str, float]:
    """Train for one epoch in this process; MiB of the process, and of its largest worker."""
    watch = WorkerMemory()
    settings = ["watch=none", "logger=none", "checkpoint=null"]
    data = {"_target_": target, "num_workers": 2}
    sizes = num_images, 100, 1
    overhead.quietly(partial(overhead.through_project, "mlp", *sizes, settings, watch, **data))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"run": peak / MIB, "worker": watch.peak / MIB}


def growth(contender: str, num_steps: int) -> dict[str, float]:
    """Train in this process; its MiB before, at a tenth of the steps, and at the last."""
    found = {"before": resident()}
    num_done = 0

    def look(*_: Any) -> None:
        nonlocal num_done
        num_done += 1
        if num_done in (num_steps // 10, num_steps):
            found["early" if num_done < num_steps else "late"] = resident()

    register_optimizer_step_post_hook(look)
    num_epochs = num_steps // STEPS_PER_EPOCH + 1
    sizes = STEPS_PER_EPOCH * overhead.BATCH_SIZE, 1000, num_epochs
    if contender == "by hand":
        overhead.by_hand(images.mlp, *sizes)
    else:
        overhead.quietly(partial(overhead.through_project, "mlp", *sizes))
    return found


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB


def show_growth(num_steps: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    figures: dict[str, list[dict[str, float]]] = {"by hand": [], "this project": []}
    for _ in range(repeats):
        for contender, rows in figures.items():
            rows.append(fresh("--contender", contender, "--steps", str(num_steps)))
    columns = f"step {num_steps // 10:,}, MiB", f"step {num_steps:,}, MiB", "growth, MiB"
    print(f"{'':14} {'before, MiB':22} " + " ".join(f"{column:22}" for column in columns))
    for name, rows in figures.items():
        values = [[row[key] for row in rows] for key in ("before", "early", "late")]
        values.append([row["late"] - row["early"] for row in rows])
        print(f"{name:14} " + " ".join(f"{contest.spread(column, 1):22}" for column in values))
    return figures


def run(target: str, num_images: int) -> dict[str, float]:
    return fresh("--target", target, "--num-images", str(num_images))


def fresh(*arguments: str) -> dict[str, float]:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=NUM_IMAGES, help="images")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--num-images", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--steps", type=int, help="of a run whose memory is looked at as it goes on"
    )
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(growth(options.contender, options.steps)))
        return
    if options.steps:
        print(contest.machine())
        contest.write(options.json, show_growth(options.steps, options.repeats))
        return
    if options.target:
        print(json.dumps(measure(options.target, options.num_images)))
        return
    contenders = {(name, size): [] for size in options.sizes for name in TARGETS}
    for _ in range(options.repeats):
        for (name, size), figures in contenders.items():
            figures.append(run(TARGETS[name], size))
    print(contest.machine())
    print(f"{'images':18} {'MiB of data':>12}   {'run, MiB':28} {'a worker on its own, MiB'}")
    for (name, size), figures in contenders.items():
        columns = [contest.spread([row[key] for row in figures], 0) for key in ("run", "worker")]
        print(f"{name:18} {size * 784 / MIB:12.0f}   {columns[0]:28} {columns[1]}")
    contest.write(options.json, {f"{name}, {size}": f for (name, size), f in contenders.items()})


if __name__ == "__main__":
    main()
