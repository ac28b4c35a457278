"""Commands on a GPU, and on the CPU to compare them with."""

import os
import signal
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from harness.checkpoints.lookup import by_step
from harness.checkpoints.reading import read
from tests.conftest import TEST_DEVICE
from tests.faults.fork_server import Started, command
from tests.faults.run_folder import only
from tests.strategy_runs import distances, free_port, outcome

IS_GPU = TEST_DEVICE == "cuda"
GPU = ("trainer.accelerator=gpu" if IS_GPU else "trainer.accelerator=cpu", "trainer.devices=1")
CPU = ("trainer.accelerator=cpu", "trainer.devices=1")
QUIET = ("trainer.enable_progress_bar=false", "logger.tensorboard=null")
# In double precision, and with a step that does not divide by the gradient's size, a GPU and a CPU
# stay as near as the order of their sums.
DOUBLE = "trainer.precision=64-true"
TINY = (
    *("experiment=synthetic", "data.num_train=250", "data.num_val=64", "data.num_test=64"),
    *("model/optimizer=sgd", "trainer.max_epochs=2", "trainer.log_every_n_steps=2", *QUIET),
)


def run(folder: Path, *words: str, env: dict[str, str] | None = None) -> Path:
    """The folder of the one run below a folder, of a command that must succeed."""
    result = command("train.py", *words, "name=run", f"output_dir={folder}", environment=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return only(folder / "run")


@cache
def on_cpu(*words: str) -> Path:
    """A run on the CPU, made once by each worker of pytest."""
    return run(Path(mkdtemp(prefix="on_cpu_")), *words, *CPU)


def apart(a: Path, b: Path, *names: str) -> dict[str, float]:
    """How far apart two runs are in their weights, results and rows; or in some, by name."""
    left, right = ({k: v for k, v in outcome(x).items() if type(v) is not str} for x in (a, b))
    chosen = {
        name: far
        for name, far in distances(left, right).items()
        if not names or any(wanted in name for wanted in names)
    }
    assert chosen
    return chosen


def assert_same(a: Path, b: Path) -> None:
    """Compare runs in double precision, whose means of losses are single."""
    for name, far in apart(a, b).items():
        assert far <= (1e-5 if ": " in name else 1e-9), name


def assert_near(a: Path, b: Path, bound: float) -> None:
    """Compare the losses of evaluations."""
    assert max(apart(a, b, "val/loss", "test/loss").values()) <= bound


def last(run_dir: Path) -> dict[str, Any]:
    """The last checkpoint."""
    return read(run_dir / "checkpoints" / "last.ckpt")


def log_of(run_dir: Path) -> str:
    return (run_dir / "run.log").read_text()


def stopped(folder: Path, signum: int, *words: str) -> Path:
    """The folder of a run that got a signal after its second checkpoint."""
    arguments = ["train.py", *words, "name=run", f"output_dir={folder}"]
    process = Started(arguments, folder / "said", folder / "said_too")
    end = time.monotonic() + 120
    while not (found := [*folder.glob("run/*/checkpoints")]) or len(by_step(found[0])) < 2:
        assert process.poll() is None, (folder / "said_too").read_text()
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, signum)
    status = process.wait(60)
    assert status == (-signum if signum == signal.SIGKILL else 128 + signum)
    return only(folder / "run")


def two_nodes(folder: Path, *words: str) -> Path:
    """The folder of a run of two processes, each a node of its own, on one device."""
    port, streams = free_port(), [folder / f"said_{node}" for node in range(2)]
    arguments = ["train.py", *words, "trainer.num_nodes=2", "name=run", f"output_dir={folder}"]
    processes = [
        Started(
            arguments,
            path,
            path,
            env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node)},
        )
        for node, path in enumerate(streams)
    ]
    statuses = [process.wait(150) for process in processes]
    assert statuses == [0, 0], "\n".join(path.read_text() for path in streams)
    return only(folder / "run")
