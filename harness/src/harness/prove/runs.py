"""Short runs of an experiment, each in processes of its own, started as a person starts train.py.

In: the words of the command. Out: how each run ended, and its folder with checkpoints and a row of
metrics.csv for each step, which `compare.py` reads. Nothing here imports torch, so a mistake in
the command is answered at once.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from harness.command.check import check
from harness.command.compose import compose_command
from harness.errors import UserError

VARIED = ("strategy", "trainer.strategy", "trainer.devices", "trainer.num_nodes", "resume")
SHORT = (
    *("++trainer.check_val_every_n_epoch=1", "++trainer.val_check_interval=null"),
    *("++trainer.num_sanity_val_steps=0", "++trainer.log_every_n_steps=1"),
    *("++trainer.enable_model_summary=false", "++trainer.enable_progress_bar=false"),
    *("++trainer.max_time=null", "checkpoint={every_n_steps:1,num_kept:1000}", "name=run"),
    "+logger.prove._target_=harness.loggers.metrics_table.MetricsTable",
    "+logger.prove.path=${run_dir}/metrics.csv",
    "+callbacks.prove._target_=harness.prove.compare.ShortRun",
)
HANGS = 124  # exit status of a run that had to be killed, as that of timeout(1)
NOISE = re.compile(r"(?i)warn|^[\s\[]|^GPU|^-*$")  # lines that are no part of a refusal
ALONE = "one process"


def words_of(strategy: str) -> tuple[list[str], int]:
    """Return the words for a strategy such as ``ddp(3)``, and its nodes: ``ddp2(2x4)`` has two."""
    match = re.fullmatch(r"(dp|ddp|ddp2|fsdp)\((?:([1-9]\d*)x)?([1-9]\d*)\)", strategy)
    if strategy == ALONE:
        return ["strategy=auto", "trainer.devices=1"], 1
    if not match:
        raise UserError(f"--strategies {strategy}: use names such as dp(2), ddp(3) or ddp2(2x2).")
    kind, num_nodes, devices = match[1], int(match[2] or 1), match[3]
    words = [f"strategy={kind}", f"trainer.devices={devices}", f"trainer.num_nodes={num_nodes}"]
    return words, num_nodes


class Ended(NamedTuple):
    """A run that has ended: its exit status, its errors, the folder around its own."""

    status: int
    errors: str
    folder: Path

    @property
    def run_dir(self) -> Path:
        """Return the run's own folder."""
        return next(path.parent for path in self.folder.glob("run/*/config.yaml"))

    @property
    def has_crashed(self) -> bool:
        """Return whether it ended with an exception or had to be killed, not with a sentence."""
        return self.status not in (0, 1) or "traceback" in self.errors.lower()

    @property
    def message(self) -> str:
        """Return the lines of a refusal, or the last line of a traceback."""
        if self.status == HANGS:
            return "was killed: it took ten times as long as one process"
        lines = [line.rstrip() for line in self.errors.splitlines() if not NOISE.search(line)]
        raised = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception)", line)]
        return raised[-1] if raised and self.has_crashed else "\n".join(lines[-4:])


class Runs:
    """Start the runs of one experiment, each in a folder of its own; `words` are train.py's.

    Raises:
        UserError: for a mistake in the words.
    """

    timeout = 86_400.0  # seconds after which a run hangs

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        typed = {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in words}
        if varied := typed.keys() & VARIED:
            raise UserError(f'{min(varied)} is varied here: use --strategies "ddp(4)", or nothing.')
        self.precision = typed.get("trainer.precision", "64-true")
        if self.precision not in ("64-true", "32-true"):
            raise UserError("trainer.precision is 64-true or 32-true here: the others round more.")
        # Settings of a strategy are for each that is tried; a strategy that lacks one refuses it.
        self.settings = [w for w in words if w.lstrip("+").startswith("trainer.strategy.")]
        self.words = [word for word in words if word not in self.settings]
        command = compose_command("train", [*self.words, *words_of(ALONE)[0]])
        check(command)
        cfg, self.num_steps = command.cfg, int(typed.get("trainer.max_steps", 6))
        if self.num_steps < 4:
            raise UserError(f"trainer.max_steps={self.num_steps}: use 4 or more.")
        # Neither two nor three processes share five batches evenly.
        num_batches = 3 * cfg.trainer.get("accumulate_grad_batches", 1)
        for stage, number in {"train": num_batches, "val": 5, "test": 5}.items():
            key = f"trainer.limit_{stage}_batches"
            self.words += [f"++{key}={number}"] * (key not in typed)
        self.words += [f"++trainer.max_{key}={self.num_steps}" for key in ("steps", "epochs")]
        self.words += [f"logger.{key}=null" for key in cfg.logger or {}]
        self.words += ["callbacks.throughput=null"] * ("throughput" in (cfg.callbacks or {}))
        self.words += ["data.num_workers=0"] * (OmegaConf.select(cfg, "data.num_workers") == "auto")
        self.folder = folder
        self.accelerator = "trainer.accelerator=" + typed.get("trainer.accelerator", "cpu")

    def start(self, strategy: str, *words: str, name: str = "") -> Ended:
        """Train from the start, with further words, into a folder of this name."""
        folder = self.folder / (name or re.sub(r"\W+", "_", strategy))
        words = (*self.words, *SHORT, f"trainer.precision={self.precision}", *words)
        return self._run(strategy, folder, *words, f'output_dir="{folder}"')

    def resume(self, ended: Ended, strategy: str) -> Ended:
        """Go on with a copy of a run from its newest checkpoint."""
        folder = self.folder / re.sub(r"\W+", "_", f"resume {strategy}")
        shutil.copytree(ended.folder, folder, symlinks=True)
        return self._run(strategy, folder, f'resume="{ended._replace(folder=folder).run_dir}"')

    def _run(self, strategy: str, folder: Path, *words: str) -> Ended:
        how = "resume, " * folder.name.startswith("resume")
        print(f"running: {how}{strategy}", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        from lightning_fabric.plugins.environments.lightning import find_free_network_port

        port = str(find_free_network_port())
        of_strategy, num_nodes = words_of(strategy)
        program = ["train.py"] if Path("train.py").is_file() else ["-m", "harness", "train"]
        program += [*words, self.accelerator, *of_strategy]
        program += self.settings if strategy != ALONE else []
        paths = [folder / f"node_{node}" for node in range(num_nodes)]
        processes = []
        for node, path in enumerate(paths):
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": str(node)}
            processes.append(start_program(program, os.environ | env, path))
        try:
            statuses = [process.wait(self.timeout) for process in processes]
        except subprocess.TimeoutExpired:
            statuses = [HANGS] * num_nodes
        finally:  # also after Ctrl-C
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        texts = [path.with_suffix(".err").read_text(errors="replace") for path in paths]
        ended = [Ended(*end, folder) for end in zip(statuses, texts, strict=True)]
        # Where a node has refused, the others end as their connections do: its sentence counts.
        return min(ended, key=lambda one: (one.status == 0, one.has_crashed))


def start_program(arguments: list[str], env: dict[str, str], path: Path) -> Any:
    """Start Python in a process group of its own; tests put something faster here.

    Its output goes to `path` with ``.out`` and ``.err``.
    """
    with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
        settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=env, stdout=out, stderr=err, **settings)
