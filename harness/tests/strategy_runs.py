"""Commands under each strategy, and what came out of them: for tables of cells."""

import csv
import json
import os
import re
import signal
import socket
import subprocess
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.faults.fast_command import members, start, wait_until_gone

STRATEGIES: dict[str, tuple[str, ...]] = {
    "cpu": ("strategy=cpu",),
    "dp(2)": ("strategy=dp", "trainer.devices=2"),
    "ddp(2)": ("strategy=ddp", "trainer.devices=2"),
    "ddp(3)": ("strategy=ddp", "trainer.devices=3"),
    "fsdp(2)": ("strategy=fsdp", "trainer.devices=2"),
    "ddp2(2x2)": ("strategy=ddp2", "trainer.devices=2", "trainer.num_nodes=2"),
}
COMMON = (
    "trainer.precision=64-true",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=3",
    "trainer.enable_progress_bar=false",
    "callbacks.learning_rate=null",
    "logger.tensorboard=null",
)
SAME = 1e-9  # in 64 bits: sums over processes are added up in another order
# Messages of torch 2.6.
NO_FSDP = not hasattr(torch.cpu.Stream, "record_event")
BROKEN = "Connection closed by peer"  # says torch where another process has ended
TIMED_OUT = 124  # the status of a run that had to be killed, as that of timeout(1)


def write_conf(folder: Path, **groups: str) -> list[str]:
    """Write a user's YAML files, by group; return the overrides that select them."""
    for group, text in groups.items():
        path = folder / "conf" / group / "mine.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [f"hydra.searchpath=[file://{folder}/conf]", *(f"{group}=mine" for group in groups)]


def execute(
    arguments: list[str], strategy: str, folder: Path, seconds: float = 120
) -> tuple[int, str]:
    """Run ``train.py`` below a folder; return the highest status of its nodes and the output.

    Args:
        arguments: overrides and options of the command.
        strategy: a key of ``STRATEGIES``.
        folder: where the runs go.
        seconds: after which all its processes are killed.
    """
    num_nodes = 2 if "num_nodes=2" in " ".join(STRATEGIES[strategy]) else 1
    port = free_port()
    paths = [folder / f"said_{node}.txt" for node in range(num_nodes)]
    arguments = [*COMMON, *STRATEGIES[strategy], f"output_dir={folder}", *arguments]
    processes: list[Any] = []
    for node, path in enumerate(paths):
        path.unlink(missing_ok=True)
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"NODE_RANK": str(node)} if num_nodes > 1 else {}
        processes.append(start(arguments, path, env))
    try:
        status = max(process.wait(timeout=seconds) for process in processes)
        is_over = all(wait_until_gone(process.pid, 20) for process in processes)
    except subprocess.TimeoutExpired:
        status, is_over = TIMED_OUT, False
    for process in processes if not is_over else []:
        if members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    texts = [path.read_text() for path in paths]
    if status and is_over:  # where a node has refused, the connections of the other one break
        texts = [text for text in texts if BROKEN not in text] or texts
    return (status if is_over else TIMED_OUT), "".join(texts)


def run_of(arguments: list[str], strategy: str, folder: Path, name: str = "run") -> Path:
    """The folder of the one run of that name, after a command that must succeed."""
    status, said = execute(arguments, strategy, folder)
    assert status == 0, said
    (run_dir,) = (folder / name).iterdir()
    return run_dir


def in_processes(number: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in forks of this process, which a Trainer takes for those that it started."""
    port = free_port()
    pids = []
    for rank in range(number):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"LOCAL_RANK": str(rank)} if number > 1 else {}
            try:
                warnings.simplefilter("ignore")  # what Lightning says of a small Trainer
                function(*arguments)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * number


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def outcome(run_dir: Path) -> dict[str, Any]:
    """The last weights of a run, its results, and every value that an evaluation has logged.

    Values of single training steps, whose names begin with ``train/``, are left out.
    """
    last = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    found: dict[str, Any] = dict(last["state_dict"])
    results = json.loads((run_dir / "results.json").read_text())
    found |= {f"results.json: {name}": value for name, value in results.items()}
    with (run_dir / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            found |= {f"step {row['step']}: {k}": float(v) for k, v in row.items() if v}
    of_steps = re.compile(r": (train/(?!.*_epoch$)|gpu/|epoch$|step$)")
    return {name: value for name, value in found.items() if not of_steps.search(name)}


def distances(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each weight and value; infinite where one lacks it."""
    found = dict.fromkeys(a.keys() ^ b.keys(), float("inf"))
    for name in a.keys() & b.keys():
        x, y = (torch.as_tensor(one[name], dtype=torch.float64) for one in (a, b))
        same = (x == y) | (x.isnan() & y.isnan())
        found[name] = float((x - y).abs().where(~same, 0).nan_to_num(nan=float("inf")).max())
    return found


def farthest(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of all weights and values."""
    return max(distances(a, b).values())
