"""Runs on two hosts: their commands, and the files that they write."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.cluster.hosts import Network, Started
from tests.strategy_runs import farthest

# Small and quick; two processes train in double precision what one does.
WORDS = (
    *("data=synthetic", "model=mlp", "trainer.accelerator=cpu", "trainer.precision=64-true"),
    *("trainer.max_epochs=1", "trainer.enable_progress_bar=false", "data.noise=0.1"),
)
NUM_STEPS = 20  # of an epoch


def torchrun(*options: str, num_processes: int = 1, nnodes: str = "2") -> list[str]:
    """Return torchrun's arguments, which are the same on both hosts, without the program's."""
    words = ["torchrun", f"--nnodes={nnodes}", f"--nproc-per-node={num_processes}"]
    words += ["--rdzv-backend=c10d", "--rdzv-id=one", "--rdzv-endpoint=host1:29400"]
    return [*words, *options]


def where(folder: Path, seconds_per_batch: float = 0.0) -> list[str]:
    """Return overrides for a run in a folder, which can be watched there if its steps take time."""
    words = [f"output_dir={folder}/outputs"]
    if seconds_per_batch:
        words += [
            "+callbacks.trace._target_=tests.faults.trace.Trace",
            f"+callbacks.trace.folder={folder}/trace",
            f"+callbacks.trace.seconds_per_batch={seconds_per_batch}",
        ]
    return words


def wait_all(started: Sequence[Started]) -> list[int]:
    """The exit statuses; fails where one command hangs."""
    return [command.wait() for command in started]


def screens(started: Sequence[Started]) -> str:
    """Return the output of all commands."""
    return "\n---\n".join(command.screen() for command in started)


def run_folders(folder: Path) -> list[Path]:
    """The folders of runs below the outputs, also of those that have left nothing in it."""
    return sorted(path for path in folder.glob("outputs/default/*") if path.is_dir())


def finished(folder: Path) -> list[Path]:
    """The runs that have come to their end."""
    return [path.parent for path in sorted(folder.glob("outputs/*/*/results.json"))]


def num_steps(folder: Path, rank: int = 0) -> int:
    """Batches that a rank has trained, in all attempts together."""
    path = folder / "trace" / f"steps_{rank}"
    return path.stat().st_size if path.exists() else 0


def distance(*runs: Path) -> float:
    """The largest difference between the last weights of two runs."""
    paths = [run_dir / "checkpoints" / "last.ckpt" for run_dir in runs]
    return farthest(*(torch.load(path, weights_only=True)["state_dict"] for path in paths))


def alone(network: Network, folder: Path, *words: str) -> Path:
    """The folder of a run by one process that nothing has disturbed."""
    there = folder / "alone"
    command = network.hosts[0].start(["train.py", *WORDS, "strategy=cpu", *where(there), *words])
    assert command.wait() == 0, command.screen()
    (run_dir,) = run_folders(there)
    return run_dir
