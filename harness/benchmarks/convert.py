"""Measure time and memory of the checkpoint converter, of `cp`, and of torch.load + torch.save.

    python benchmarks/convert.py [--gigabytes 2] [--repeats 5]

It writes a Lightning checkpoint, and removes it at the end. Each contender is a new process, timed
until its output is on the disk. The checkpoint is in the page cache. `cp` copies a file that
contains the weights alone.
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import contest

import harness

CONVERT = [sys.executable, "-m", "harness.convert", "run.ckpt", "--force", "-o"]
# Three times the weights' size, as Lightning saves a compiled DDP network with Adam.
SAVE = """
import sys, torch
width = int((float(sys.argv[1]) * 1e9 / 4 / 30) ** 0.5)
weights = {f"blocks.{i}.weight": torch.rand(width, width) for i in range(30)}
torch.save(weights, "weights.pt")
state = {f"net._orig_mod.module.{name}": value for name, value in weights.items()}
moments = [{"exp_avg": w * 2, "exp_avg_sq": w * 3} for w in weights.values()]
optimizers = [{"state": dict(enumerate(moments)), "param_groups": []}]
version = {"pytorch-lightning_version": "2.6.6"}
torch.save({"state_dict": state, "optimizer_states": optimizers, **version}, "run.ckpt")
"""
NAIVE = """
import os, torch
state = torch.load("run.ckpt", map_location="cpu", weights_only=True)["state_dict"]
state = {name.replace("net._orig_mod.module.", ""): value for name, value in state.items()}
torch.save(state, "naive.pt")
os.fsync(os.open("naive.pt", os.O_RDONLY))
"""
CONTENDERS = {
    "cp + sync": ["sh", "-c", "cp weights.pt cp.pt && sync cp.pt"],
    "converter": [*CONVERT, "converted.pt"],
    "converter, to .safetensors": [*CONVERT, "converted.safetensors"],
    "torch.load + torch.save": [sys.executable, "-c", NAIVE],
}


def seconds(command: list[str], folder: str, peaks: dict[str, float], name: str) -> float:
    """Run a contender to its end, and note its peak memory in MiB."""
    os.sync()  # so that no contender waits for the writes of the one before
    package = str(Path(harness.__path__[0]).parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": package}
    # Started by a shell, because a child of Python would begin with Python's peak memory.
    words = ["sh", "-c", 'cd "$0" && exec "$@" > /dev/null', folder, *command]
    started = time.perf_counter()
    _, status, usage = os.wait4(os.posix_spawnp("sh", words, environment), 0)
    ended = time.perf_counter()
    assert status == 0, command
    peaks[name] = max(peaks.get(name, 0.0), usage.ru_maxrss / 1024)
    return ended - started


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=5)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of weights")
    options = parser.parse_args()
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=os.curdir) as folder:
        # In another process, because this one must stay smaller than the processes it measures.
        make = [sys.executable, "-c", SAVE, str(options.gigabytes)]
        subprocess.run(make, cwd=folder, check=True)
        turns = {
            name: partial(seconds, command, folder, peaks, name)
            for name, command in CONTENDERS.items()
        }
        figures = contest.take_turns(turns, options.repeats)
    contest.show(f"{options.gigabytes} GB of weights", "seconds", figures)
    print("\npeak memory, MiB: " + ", ".join(f"{name} {mib:,.0f}" for name, mib in peaks.items()))


if __name__ == "__main__":
    main()
