"""Short runs of an experiment, each in processes of its own, started as a person starts train.py.

In: the words of the command. Out: how each run ended, and its folder with checkpoints and a row of
metrics.csv for each step, which `compare.py` reads. Nothing here imports torch, so a mistake in
the command is answered at once.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from harness.command import validate
from harness.command.compose import compose_command
from harness.errors import UserError

TRIED = ("strategy", "trainer.strategy", "trainer.devices", "trainer.num_nodes")
# Neither two nor three processes share five batches evenly.
LIMITS = {"limit_train_batches": 3, "limit_val_batches": 5, "limit_test_batches": 5}
SHORT = (
    "++trainer.check_val_every_n_epoch=1",
    "++trainer.enable_model_summary=false",
    "++trainer.enable_progress_bar=false",
    "++trainer.log_every_n_steps=1",
    "++trainer.max_time=null",
    "++trainer.num_sanity_val_steps=0",
    "++trainer.val_check_interval=null",
    "+logger.prove._target_=harness.loggers.metrics_table.MetricsTable",
    "+logger.prove.path=${run_dir}/metrics.csv",
    "+callbacks.prove._target_=harness.prove.compare.ShortRun",
    "+callbacks.prove.run_dir=${run_dir}",
    "checkpoint={every_n_steps:1,num_kept:1000}",
    "name=run",
)
HANGS = 124  # exit status of a run that had to be killed, as that of timeout(1)
NOISE = re.compile(r"(?i)warn|^[\s\[]|^GPU|^-+$")  # lines that are no part of a refusal


class Strategy(NamedTuple):
    """A way to share an experiment between devices; each node is a command of its own."""

    name: str
    words: tuple[str, ...]
    num_nodes: int = 1


ALONE = Strategy("one process", ("strategy=auto", "trainer.devices=1"))


def strategy(name: str) -> Strategy:
    """Read a strategy's name, such as ``ddp(3)``; ``ddp2(2x4)`` is two nodes of four devices."""
    found = re.fullmatch(r"(dp|ddp|ddp2|fsdp)\((?:([1-9]\d*)x)?([1-9]\d*)\)", name)
    if not found or (found[2] and found[1] in ("dp", "fsdp")):
        raise UserError(f"--strategies {name}: use names such as dp(2), ddp(3) or ddp2(2x2).")
    kind, num_nodes, devices = found[1], int(found[2] or 1), int(found[3])
    words = (f"strategy={kind}", f"trainer.devices={devices}", f"trainer.num_nodes={num_nodes}")
    return Strategy(name, words, num_nodes)


class Ended(NamedTuple):
    """A run that has ended: its exit status, what it said, the folder around its own."""

    status: int
    said: str
    folder: Path

    @property
    def run_dir(self) -> Path:
        """The run's own folder."""
        return next(path.parent for path in self.folder.glob("run/*/config.yaml"))

    @property
    def is_refused(self) -> bool:
        """Whether it ended with a sentence; an exception has a traceback, or names its file."""
        return self.status == 1 and "traceback" not in self.said.lower()

    @property
    def sentence(self) -> str:
        """The lines of a refusal, or the last line of a traceback."""
        lines = [line.rstrip() for line in self.said.splitlines() if line.strip()]
        if "Traceback (most recent call last)" in self.said:
            raised = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception)", line)]
            return (raised or lines)[-1]
        return "\n".join([line for line in lines if not NOISE.search(line)][-4:])


class Runs:
    """Starts the runs of one experiment.

    Args:
        words: what train.py takes.
        folder: gets a folder for each run.

    Raises:
        UserError: for a mistake in the words.
    """

    timeout = 86_400.0  # seconds after which a run hangs

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        typed = {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in words}
        if tried := typed.keys() & TRIED:
            raise UserError(f'{min(tried)} is what is tried here: use --strategies "ddp(4)".')
        if "resume" in typed:
            raise UserError("resume= goes on with a run, and here short ones begin: leave it out.")
        self.precision = typed.get("trainer.precision", "64-true")
        if self.precision not in ("64-true", "32-true"):
            raise UserError("trainer.precision is 64-true or 32-true here: the others round more.")
        self.may_round = "trainer.precision" not in typed
        self.typed, self.folder = " ".join(words), folder
        # Settings of a strategy are for each that is tried; a strategy that lacks one refuses it.
        self.settings = [w for w in words if w.lstrip("+").startswith("trainer.strategy.")]
        self.words = [word for word in words if word not in self.settings]
        command = compose_command("train", [*self.words, *ALONE.words])
        validate.check(command)
        self.accelerator = "trainer.accelerator=" + typed.get("trainer.accelerator", "cpu")
        self.num_steps = int(typed.get("trainer.max_steps", 6))
        if self.num_steps < 4:
            raise UserError(f"trainer.max_steps={self.num_steps}: use 4 or more.")
        cfg, num_steps = command.cfg, self.num_steps
        num_batches = LIMITS["limit_train_batches"] * cfg.trainer.get("accumulate_grad_batches", 1)
        limits = LIMITS | {"limit_train_batches": num_batches}
        self.words += [
            f"++trainer.{k}={v}" for k, v in limits.items() if f"trainer.{k}" not in typed
        ]
        self.words += [f"++trainer.max_steps={num_steps}", f"++trainer.max_epochs={num_steps}"]
        self.words += [f"logger.{key}=null" for key in cfg.logger or {}]
        self.words += ["callbacks.throughput=null"] * ("throughput" in (cfg.callbacks or {}))
        self.words += ["data.num_workers=0"] * (OmegaConf.select(cfg, "data.num_workers") == "auto")

    def start(self, name: str, how: Strategy, **settings: object) -> Ended:
        """Train from the start, with settings of ``ShortRun``, into a folder of this name."""
        folder = self.folder / re.sub(r"\W+", "_", name).strip("_")
        words = [*self.words, *SHORT, f"trainer.precision={self.precision}"]
        words += [f"+callbacks.prove.{key}={value}" for key, value in settings.items()]
        return self._run(how, folder, *words, f'output_dir="{folder}"')

    def resume(self, name: str, ended: Ended, how: Strategy) -> Ended:
        """Go on with a copy of a run from its newest checkpoint."""
        folder = self.folder / name.replace(" ", "_")
        shutil.copytree(ended.folder, folder, symlinks=True)
        return self._run(how, folder, f'resume="{ended._replace(folder=folder).run_dir}"')

    def _run(self, how: Strategy, folder: Path, *words: str) -> Ended:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        program = ["train.py"] if Path("train.py").is_file() else ["-m", "harness", "train"]
        program += [*words, self.accelerator, *how.words]
        program += self.settings if how is not ALONE else []
        paths = [folder / f"node_{node}" for node in range(how.num_nodes)]
        processes = []
        for node, path in enumerate(paths):
            env = os.environ | (address | {"NODE_RANK": str(node)} if how.num_nodes > 1 else {})
            processes.append(start_program(program, env, path))
        try:
            statuses = [process.wait(self.timeout) for process in processes]
        except subprocess.TimeoutExpired:
            statuses = [HANGS]
        finally:  # also after Ctrl-C
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        status, path = max(zip(statuses, paths, strict=False), key=lambda pair: pair[0] != 0)
        out, err = (path.with_suffix(kind).read_text(errors="replace") for kind in (".out", ".err"))
        return Ended(status, err.strip() or out, folder)


def start_program(arguments: list[str], env: dict[str, str], path: Path) -> Any:
    """Start Python in a process group of its own; tests put something faster here.

    Args:
        arguments: behind ``python``.
        env: all of its environment.
        path: of its output, without ``.out`` and ``.err``.
    """
    with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
        settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=env, stdout=out, stderr=err, **settings)
