"""Runs on two hosts: the words that start them, and what they leave."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from tests.cluster.hosts import PATIENCE_SECONDS, Network, Started

# Small and quick; two processes train in double precision what one does.
WORDS = (
    *("data=synthetic", "model=mlp", "trainer.accelerator=cpu", "trainer.precision=64-true"),
    *("trainer.max_epochs=1", "trainer.enable_progress_bar=false", "data.noise=0.1"),
)
NUM_STEPS = 20  # of an epoch
DDP = ("strategy=ddp", "trainer.devices=1", "trainer.num_nodes=2")
DDP2 = ("strategy=ddp2", "trainer.devices=2", "trainer.num_nodes=2")
PORT = 29400
TRACEBACK = "Traceback (most recent call last)"


def torchrun(*options: str, num_processes: int = 1, nnodes: str = "2") -> list[str]:
    """The words of torchrun, the same on both hosts, up to those of its program."""
    words = ["torchrun", f"--nnodes={nnodes}", f"--nproc-per-node={num_processes}"]
    words += ["--rdzv-backend=c10d", "--rdzv-id=one", f"--rdzv-endpoint=host1:{PORT}"]
    return [*words, *options]


def where(folder: Path, seconds_per_batch: float = 0.0) -> list[str]:
    """Words for a run that goes to a folder and can be watched there."""
    words = [f"output_dir={folder}/outputs"]
    if seconds_per_batch:
        words += [
            "+callbacks.trace._target_=tests.faults.trace.Trace",
            f"+callbacks.trace.folder={folder}/trace",
            f"+callbacks.trace.seconds_per_batch={seconds_per_batch}",
        ]
    return words


def start_both(
    network: Network, *words: str, launcher: Sequence[str] | None = None, other: Sequence[str] = ()
) -> list[Started]:
    """Start the same command on both hosts by torchrun; the second has ``other`` words besides."""
    begin = [*(launcher or torchrun()), "train.py", *WORDS]
    more: list[Sequence[str]] = [(), other]
    return [
        host.start([*begin, *words, *extra])
        for host, extra in zip(network.hosts, more, strict=True)
    ]


def wait_all(started: Sequence[Started], seconds: float = PATIENCE_SECONDS) -> list[int]:
    """The exit statuses; fails where one command hangs."""
    return [command.wait(seconds) for command in started]


def screens(started: Sequence[Started]) -> str:
    """What all commands have printed."""
    return "\n---\n".join(command.screen() for command in started)


def run_folders(folder: Path, name: str = "default") -> list[Path]:
    """The folders of runs below the outputs, also of those that have left nothing in it."""
    parent = folder / "outputs" / name
    return sorted(path for path in parent.glob("*") if path.is_dir())


def finished(folder: Path) -> list[Path]:
    """The runs that have come to their end."""
    return [path.parent for path in sorted(folder.glob("outputs/*/*/results.json"))]


def config(run_dir: Path) -> Any:
    """The settings of a run."""
    return OmegaConf.load(run_dir / "config.yaml")


def num_steps(folder: Path, rank: int = 0) -> int:
    """Batches that a rank has trained, in all attempts together."""
    path = folder / "trace" / f"steps_{rank}"
    return path.stat().st_size if path.exists() else 0


def weights(run_dir: Path) -> dict[str, Any]:
    """The last weights of a run, as arrays: torch computes with threads, and a fork lacks them."""
    path = run_dir / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name: value.numpy() for name, value in state.items()}


def distance(one: Path, other: Path) -> float:
    """The largest difference between the last weights of two runs."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    return max(float(abs(ours[name] - theirs[name]).max()) for name in ours)


def alone(network: Network, folder: Path, *words: str) -> Path:
    """The folder of a run by one process that nothing has disturbed."""
    there = folder / "alone"
    start = [*WORDS, "strategy=cpu", *where(there), *words]
    command = network.hosts[0].start(["train.py", *start])
    assert command.wait() == 0, command.screen()
    (run_dir,) = run_folders(there)
    return run_dir
