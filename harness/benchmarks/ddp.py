"""Measure the speed of several processes and devices, and the cost of the parity check.

    python benchmarks/ddp.py [--network mlp|cnn] [--repeats 5]
    python benchmarks/ddp.py --check

The first command runs the training of overhead.py, beside a loop with DistributedDataParallel
written by hand. The processes divide the cores between them. On a CPU the devices of dp are the
same cores, so dp cannot be faster. --check measures the milliseconds of each parity check in a run
that accumulates batches. prove.py checks whether the weights are equal.
"""

import argparse
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import contest
import images
import overhead
import pytorch_lightning as pl
import torch.distributed as dist

from harness.devices import usable_cores
from harness.parity.parity_callback import ParityChecks

# name: the number of processes to start, and the overrides of a run
STRATEGIES = {
    "one process": (1, ["strategy=auto"]),
    "dp(2)": (1, ["strategy=dp", "trainer.devices=2"]),
    "ddp(2)": (2, ["strategy=ddp", "trainer.devices=2"]),
}
CONTENDERS = {"by hand, 1": 1, "by hand, 2": 2, **{name: n for name, (n, _) in STRATEGIES.items()}}


def start(command: list[str], num_processes: int) -> str:
    """Run a command in several processes, as torchrun does; return the output of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in map(str, range(num_processes)):
        own = os.environ | {"OMP_NUM_THREADS": str(max(1, usable_cores() // num_processes))}
        if num_processes > 1:
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
    """Train as one rank of a contender, and return its steps per second."""
    sizes = options.num_train, options.num_train // 6, overhead.NUM_EPOCHS
    if options.contender in STRATEGIES:
        overrides = tuple(STRATEGIES[options.contender][1])
        return overhead.quietly(
            partial(overhead.through_harness, options.network, *sizes, overrides)
        )
    if CONTENDERS[options.contender] > 1:
        dist.init_process_group("nccl" if overhead.DEVICE == "cuda" else "gloo")
    make = getattr(images, options.network)
    steps_per_second = overhead.quietly(partial(overhead.by_hand, make, *sizes))
    if dist.is_initialized():
        dist.destroy_process_group()
    return steps_per_second


def measure_speed(options: argparse.Namespace) -> None:
    """Print the steps per second of all contenders."""
    sizes = [f"--network={options.network}", f"--num-train={options.num_train}"]

    def run(name: str) -> float:
        arguments = [str(Path(__file__).resolve()), *sizes, f"--contender={name}"]
        return float(start([sys.executable, *arguments], CONTENDERS[name]).split()[-1])

    turns = {name: partial(run, name) for name in CONTENDERS}
    figures = contest.take_turns(turns, options.repeats)
    contest.show(options.network, "steps/s", figures, decimals=0)


class CheckCost(pl.Callback):
    """Store the number and the seconds of a run's parity checks at its end."""

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        (checks,) = (c for c in trainer.callbacks if isinstance(c, ParityChecks))
        self.seconds, self.number = checks.seconds, checks.num_checks


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=5)
    parser.add_argument("--network", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--num-train", type=int, default=images.NUM_TRAIN)
    parser.add_argument("--check", action="store_true", help="measure the parity check")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(train(options))
    elif options.check:
        for network in ("mlp", "cnn"):
            cost = CheckCost()
            overrides = ("trainer.accumulate_grad_batches=2",)
            run = partial(overhead.through_harness, network, 2048, 128, 3, overrides, watch=[cost])
            overhead.quietly(run)
            each = 1000 * cost.seconds / cost.number
            print(f"{network}: {cost.number} checks, {each:.1f} ms each", flush=True)
    else:
        measure_speed(options)


if __name__ == "__main__":
    main()
