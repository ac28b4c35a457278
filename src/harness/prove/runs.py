"""Short runs of the owner's experiment, each a command as a person would type it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.command import validate
from harness.command.compose import compose_command
from harness.errors import UserError
from harness.prove.records import Records

RECORDER = "harness.prove.recording.Recorder"
MOST_SAID = 3  # lines of a refusal
NOISE = re.compile(
    r"(?i)warn|^\s*(GPU|TPU|HPU|💡|\[|INFO|Seed|Initializing|distributed_backend|All dist)|^-+$"
)


@dataclass(frozen=True)
class Strategy:
    """A way to share one experiment between devices, such as ``ddp(3)`` or ``ddp2(2x2)``."""

    name: str
    words: tuple[str, ...]
    num_nodes: int = 1
    num_processes: int = 1

    @property
    def kind(self) -> str:
        """Without its numbers."""
        return self.name.partition("(")[0]


def strategy(name: str) -> Strategy:
    """Read a name as the table shows it.

    Raises:
        UserError: for any other.
    """
    found = re.fullmatch(r"(dp|ddp|ddp2)\((?:(\d+)x)?(\d+)\)", name)
    if not found or (found[2] and found[1] == "dp") or int(found[3]) < 1:
        raise UserError(f"--strategies {name}: use names such as dp(2), ddp(3) or ddp2(2x2).")
    kind, num_nodes, devices = found[1], int(found[2] or 1), int(found[3])
    words = (f"strategy={kind}", f"trainer.devices={devices}", f"trainer.num_nodes={num_nodes}")
    per_node = devices if kind == "ddp" else 1
    return Strategy(name, words, num_nodes, per_node * num_nodes)


ALONE = Strategy("one process", ("strategy=auto", "trainer.devices=1"))


@dataclass
class Ended:
    """A command that has ended."""

    strategy: Strategy
    status: int
    said: str
    folder: Path  # of its output
    words: tuple[str, ...] = ()

    @cached_property
    def run_dir(self) -> Path:
        """Where the run has written."""
        return next(path.parent for path in self.folder.glob("run/*/config.yaml"))

    @cached_property
    def records(self) -> Records:
        """What it has recorded; read at once, for a run that goes on writes over it."""
        return Records.read(self.run_dir / "prove")

    @property
    def is_refused(self) -> bool:
        """Whether it ended with a sentence."""
        return self.status == 1 and "Traceback (most recent call last)" not in self.said

    @property
    def sentence(self) -> str:
        """The last that it said."""
        lines = [line.rstrip() for line in self.said.splitlines() if line.strip()]
        if "Traceback (most recent call last)" not in self.said:
            lines = [line for line in lines if not NOISE.search(line)]
            return "\n".join(lines[-MOST_SAID:])
        raised = (x for x in reversed(lines) if re.match(r"\w[\w.]*(Error|Exception)", x))
        return next(raised, lines[-1])


@dataclass
class Runs:
    """Starts the runs of one experiment.

    Args:
        words: what train.py takes.
        folder: for all runs.
        num_steps: optimizer steps of each.
        timeout: seconds after which a run counts as one that hangs.
        conf: the folder of the config files.
    """

    words: Sequence[str]
    folder: Path
    num_steps: int
    timeout: float
    conf: str = "conf"
    precision: str = "64-true"
    common: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        command = compose_command("train", [*self.words, *ALONE.words], self.conf)
        validate.check(command)
        cfg: Any = command.cfg
        self.has_sync_batchnorm = bool(cfg.trainer.sync_batchnorm)
        # Whose networks a converter may build.
        self.packages = sorted(
            set(re.findall(r"_target_: (\w+)\.", OmegaConf.to_yaml(cfg))) - {"torch"}
        )
        typed = {word.lstrip("+").partition("=")[0] for word in self.words}
        defaults = {
            "trainer.accelerator": "cpu",
            "trainer.limit_val_batches": 5,  # that two and three processes share unevenly
            "trainer.limit_test_batches": 5,
        }
        # A key that was typed is the owner's choice.
        self.common = [f"{k}={v}" for k, v in defaults.items() if k not in typed]
        self.accelerator = cfg.trainer.accelerator if "trainer.accelerator" in typed else "cpu"
        self.common += [f"{group}.{key}=null" for group in ("logger",) for key in cfg[group] or {}]
        self.common += [
            f"trainer.max_steps={self.num_steps}",
            f"trainer.max_epochs={self.num_steps}",
            "trainer.max_time=null",
            "trainer.val_check_interval=null",
            "trainer.check_val_every_n_epoch=1",
            "trainer.limit_train_batches=null",
            "trainer.num_sanity_val_steps=0",
            "trainer.enable_progress_bar=false",
            "trainer.enable_model_summary=false",
            "trainer.log_every_n_steps=1",
            "checkpoint.every_n_steps=1",
            "checkpoint.num_kept=1000",
            "callbacks.throughput=null",
            "name=run",
            f"+callbacks.prove._target_={RECORDER}",
            "+callbacks.prove.folder=${run_dir}/prove",
        ]

    def start(self, name: str, how: Strategy, *words: str, **recorder: Any) -> Ended:
        """Train from the start, into a folder of this name."""
        more = [f"+callbacks.prove.{key}={value}" for key, value in recorder.items()]
        precision = f"trainer.precision={self.precision}"
        folder = self.folder / re.sub(r"\W+", "_", name).strip("_")
        all_words = [*self.words, *how.words, *self.common, precision, *more, *words]
        return self._run(how, folder, *all_words, f'output_dir="{folder}"')

    def resume(self, ended: Ended, how: Strategy) -> Ended:
        """Go on with a run from its newest checkpoint."""
        accelerator = f"trainer.accelerator={self.accelerator}"
        return self._run(how, ended.folder, f'resume="{ended.run_dir}"', *how.words, accelerator)

    def _run(self, how: Strategy, folder: Path, *words: str) -> Ended:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        is_script = Path("train.py").is_file() and self.conf == "conf"
        program = ["train.py"] if is_script else ["-m", "harness", "train"]
        addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = []
        for node in range(how.num_nodes):
            env = os.environ | (addresses | {"NODE_RANK": str(node)} if how.num_nodes > 1 else {})
            path = folder / f"node_{node}"
            processes.append(start_program([*program, *words], env, path))
        statuses = [wait(process, self.timeout) for process in processes]
        node = next((i for i, status in enumerate(statuses) if status), 0)
        path = folder / f"node_{node}"
        said = [path.with_suffix(kind).read_text(errors="replace") for kind in (".err", ".out")]
        return Ended(how, statuses[node], said[0].strip() or said[1], folder, words)


def start_program(arguments: list[str], env: dict[str, str], path: Path) -> Any:
    """Start Python in a process group of its own; tests put something faster here.

    Args:
        arguments: behind ``python``.
        env: all of its environment.
        path: of its output, without ``.out`` and ``.err``.
    """
    with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=env,
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def wait(process: Any, seconds: float) -> int:
    """The exit status of a process; 124 where it had to be killed."""
    end = time.monotonic() + seconds
    try:
        while (status := process.poll()) is None:
            if time.monotonic() > end:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return 124
            time.sleep(0.01)
    except BaseException:  # Ctrl-C
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return int(status)
