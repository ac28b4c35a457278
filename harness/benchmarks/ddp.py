"""Several processes through this project, beside a loop with DistributedDataParallel by hand.

    python benchmarks/ddp.py [--network mlp|cnn] [--repeats 5] [--json ddp.json]

The training is the one of overhead.py: batches of 128 in sum over all processes. Each process
gets its share of the machine's cores. dp and ddp2 stand beside them, with what they cost: on CPUs
their devices are the same cores, so the copies of the network and the batch buy nothing here.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from functools import partial

import contest
import images
import overhead
import torch.distributed as dist

from harness.machine.limits import usable_cores

# name: processes, and the settings of this project; None is the loop by hand
CONTENDERS: dict[str, tuple[int, list[str] | None]] = {
    "by hand, 1 process": (1, None),
    "this project, 1 process": (1, ["strategy=auto"]),
    "by hand, 2 processes": (2, None),
    "this project, ddp(2)": (2, ["strategy=ddp", "trainer.devices=2"]),
    "this project, dp(2)": (1, ["strategy=dp", "trainer.devices=2"]),
    "this project, ddp2(2x1)": (2, ["strategy=ddp2", "trainer.devices=1", "trainer.num_nodes=2"]),
    "this project, ddp2(2x2)": (2, ["strategy=ddp2", "trainer.devices=2", "trainer.num_nodes=2"]),
}


def train(options: argparse.Namespace) -> float:
    """One process's part."""
    num_processes, overrides = CONTENDERS[options.contender]
    sizes = options.num_train, options.num_train // 6, options.num_epochs
    if overrides is None:
        if num_processes > 1:
            dist.init_process_group("nccl" if overhead.DEVICE == "cuda" else "gloo")
        measure = partial(overhead.by_hand, getattr(images, options.network), *sizes)
    else:
        measure = partial(overhead.through_project, options.network, *sizes, tuple(overrides))
    steps_per_second = overhead.quietly(measure)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return steps_per_second


def run(contender: str, arguments: list[str]) -> float:
    """Start a contender's processes; return the first one's steps per second."""
    num_processes, overrides = CONTENDERS[contender]
    command = [sys.executable, __file__, *arguments, "--contender", contender]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(num_processes):
        num_threads = max(1, usable_cores() // num_processes)
        environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        if num_processes > 1 and overrides and overrides[0] == "strategy=ddp2":
            environment |= address | {"NODE_RANK": str(rank)}
        elif num_processes > 1:
            # What torchrun sets for each process.
            environment |= address | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(num_processes),
                "LOCAL_WORLD_SIZE": str(num_processes),
                "TORCHELASTIC_RUN_ID": "benchmark",
            }
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), contender
    return float(json.loads(outputs[0].splitlines()[-1]))


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=5)
    parser.add_argument("--network", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--num-train", type=int, default=images.NUM_TRAIN)
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(train(options)))
        return
    arguments = [f"--network={options.network}", f"--num-train={options.num_train}"]
    arguments.append(f"--num-epochs={options.num_epochs}")
    turns = {name: partial(run, name, arguments) for name in CONTENDERS if name in options.only}
    figures = contest.take_turns(turns, options.repeats)
    print(contest.machine())
    print(f"{options.network:26} {'steps/s (min - max)':24} of the loop by hand (min - max)")
    for name, values in figures.items():
        is_several = CONTENDERS[name][0] > 1
        baseline = figures.get("by hand, 2 processes" if is_several else "by hand, 1 process")
        share = contest.ratio(values, baseline) if baseline else ""
        print(f"{name:26} {contest.spread(values, 0):24} {share}")
    contest.write(options.json, figures)


if __name__ == "__main__":
    main()
