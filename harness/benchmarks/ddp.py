"""Several processes and devices: how fast, how equal, and what the first-batch check costs.

    python benchmarks/ddp.py [--network mlp|cnn] [--repeats 5] [--json ddp.json]
    python benchmarks/ddp.py --weights [--picture docs/strategies.png]
    python benchmarks/ddp.py --check

The first is the training of overhead.py, beside a loop with DistributedDataParallel by hand; each
process gets its share of the cores. On CPUs the devices of dp and ddp2 are the same cores, so
copies of network and batch buy nothing. --weights trains three epochs with uneven batches under
each strategy and prints how far weights and test loss are from one device. --check measures the
check before the first step: seconds, and the memory of the child in which it runs.
"""

import argparse
import csv
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import contest
import images
import overhead
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from harness.exact.first_batch import in_child
from harness.exact.first_batch_check import check_first_batch
from harness.machine import usable_cores

# name: the processes that are started here, and the words of a run
STRATEGIES = {
    "one process": (1, ["strategy=auto"]),
    "dp(2)": (1, ["strategy=dp", "trainer.devices=2"]),
    "ddp(2)": (2, ["strategy=ddp", "trainer.devices=2"]),
    "ddp2(2x1)": (2, ["strategy=ddp2", "trainer.devices=1", "trainer.num_nodes=2"]),
    "ddp2(2x2)": (2, ["strategy=ddp2", "trainer.devices=2", "trainer.num_nodes=2"]),
}
CONTENDERS = {"by hand, 1": 1, "by hand, 2": 2, **{name: n for name, (n, _) in STRATEGIES.items()}}
UNEVEN = ["trainer.accelerator=cpu", "trainer.max_epochs=3", "data.batch_size=37"]
UNEVEN += ["trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false"]


def start(command: list[str], num_processes: int, are_nodes: bool, num_threads: int) -> str:
    """Run a command in several processes; return what the first one prints.

    Each is a node that a person starts, or has the variables that torchrun sets.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in map(str, range(num_processes)):
        own = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        if are_nodes:
            own |= address | {"NODE_RANK": rank}
        elif num_processes > 1:
            own |= address | {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
            own |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
            own |= {"TORCHELASTIC_RUN_ID": "benchmark"}
        processes.append(
            subprocess.Popen(command, env=own, cwd=contest.ROOT, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), command
    return outputs[0]


def train(options: argparse.Namespace) -> float:
    """Train one process's part of a contender, and return its steps per second."""
    sizes = options.num_train, options.num_train // 6, options.num_epochs
    if options.contender in STRATEGIES:
        words = STRATEGIES[options.contender][1]
        return overhead.quietly(
            partial(overhead.through_harness, options.network, *sizes, tuple(words))
        )
    if CONTENDERS[options.contender] > 1:
        dist.init_process_group("nccl" if overhead.DEVICE == "cuda" else "gloo")
    make = getattr(images, options.network)
    steps_per_second = overhead.quietly(partial(overhead.by_hand, make, *sizes))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return steps_per_second


def measure_speed(options: argparse.Namespace) -> None:
    """Print the steps per second of all contenders."""
    command = [sys.executable, str(Path(__file__).resolve()), f"--network={options.network}"]
    command += [f"--num-train={options.num_train}", f"--num-epochs={options.num_epochs}"]

    def run(name: str) -> float:
        num_processes = CONTENDERS[name]
        num_threads = max(1, usable_cores() // num_processes)
        words = [*command, f"--contender={name}"]
        return float(start(words, num_processes, "ddp2" in name, num_threads).split()[-1])

    turns = {name: partial(run, name) for name in CONTENDERS if name in options.only}
    figures = contest.take_turns(turns, options.repeats)
    contest.show(options.network, "steps/s", figures, decimals=0)
    contest.write(options.json, figures)


def compare_weights(options: argparse.Namespace) -> None:
    """Print the differences of whole runs from one device, and draw their losses."""
    print("| precision | strategy | largest difference of a weight | of the test loss |")
    print("|---|---|---|---|", flush=True)
    for precision in ("64-true", "32-true"):
        with tempfile.TemporaryDirectory() as folder:
            runs = {}
            for name, (num_processes, words) in STRATEGIES.items():
                command = [sys.executable, "train.py", *UNEVEN, *words]
                place = Path(folder, str(len(runs)))
                command += [f"trainer.precision={precision}", f"output_dir={place}"]
                are_nodes = name.startswith("ddp2")  # ddp starts its own processes
                start(command, num_processes if are_nodes else 1, are_nodes, 1)
                runs[name] = next(place.glob("*/*"))
            one = runs["one process"]
            for name, run in runs.items():
                difference = float((weights(run) - weights(one)).abs().max())
                loss = abs(test_loss(run) - test_loss(one))
                print(f"| {precision} | {name} | {difference:.1e} | {loss:.1e} |", flush=True)
            if options.picture and precision == "32-true":
                draw(runs, options.picture)


def weights(run: Path) -> torch.Tensor:
    """Return all weights of the network after the last step, in one vector."""
    path = run / "checkpoints" / "last.ckpt"
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    values = [value.flatten().double() for key, value in state.items() if key.startswith("net.")]
    return torch.cat(values)


def test_loss(run: Path) -> float:
    return float(json.loads((run / "results.json").read_text())["test/loss"])


def draw(runs: dict[str, Path], picture: Path) -> None:
    """Draw the training losses, wide to narrow: a curve that lay beside the others would show."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss", yscale="log")
    for i, (strategy, run) in enumerate(runs.items()):
        rows = [*csv.DictReader((run / "metrics.csv").read_text().splitlines())]
        points = [(int(row["step"]), float(row["train/loss"])) for row in rows if row["train/loss"]]
        axes.plot(*zip(*points, strict=True), label=strategy, linewidth=9 - 1.8 * i, alpha=0.8)
    axes.legend()
    figure.savefig(picture, dpi=110)


class CheckCost(pl.Callback):
    """Measure the first-batch check before the first step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 0:
            started = time.perf_counter()
            in_child(partial(check_first_batch, pl_module, trainer.train_dataloader))
            self.seconds = time.perf_counter() - started
            self.mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=5)
    parser.add_argument("--network", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--num-train", type=int, default=images.NUM_TRAIN)
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--weights", action="store_true", help="compare whole runs")
    parser.add_argument("--picture", type=Path, help="of the losses that --weights compares")
    parser.add_argument("--check", action="store_true", help="measure the first-batch check")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(train(options))
    elif options.weights:
        compare_weights(options)
    elif options.check:
        for network in ("mlp", "cnn"):
            cost = CheckCost()
            run = partial(overhead.through_harness, network, 256, 128, 1, watch=[cost])
            overhead.quietly(run)
            print(f"{network}: {cost.seconds:.2f} s, the child has {cost.mib:,.0f} MiB")
    else:
        measure_speed(options)


if __name__ == "__main__":
    main()
