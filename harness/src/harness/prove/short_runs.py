"""Short runs of an experiment, each in its own processes, started as a user starts train.py.

In: the command's overrides. Out: an ``EndedRun`` for each run, whose folder has checkpoints, and
metrics.csv with one row per step. Next: `compare.py` reads both. This file imports no torch, so the
command reports a mistake at once.
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
HANGS = 124  # status of a run that was killed after its timeout, as in timeout(1)
NOISE = re.compile(r"(?i)warn|^[\s\[]|^GPU|^-*$")  # lines that are not part of an error message
ALONE = "one process"
STRATEGY = "trainer.strategy."  # the beginning of a strategy's settings


def overrides_of(strategy: str) -> tuple[list[str], int]:
    """Return a strategy's overrides and its number of nodes.

    ``ddp(3)`` has 3 devices on one node, ``ddp2(2x4)`` has 2 nodes with 4 devices each.

    Raises:
        UserError: the strategy does not have this form.
    """
    match = re.fullmatch(r"(dp|ddp|ddp2|fsdp)\((?:([1-9]\d*)x)?([1-9]\d*)\)", strategy)
    if strategy == ALONE:
        return ["strategy=auto", "trainer.devices=1"], 1
    if not match:
        raise UserError(f"--strategies {strategy}: use names such as dp(2), ddp(3) or ddp2(2x2).")
    kind, num_nodes, devices = match[1], int(match[2] or 1), match[3]
    overrides = [f"strategy={kind}", f"trainer.devices={devices}", f"trainer.num_nodes={num_nodes}"]
    return overrides, num_nodes


class EndedRun(NamedTuple):
    """A run that has ended."""

    status: int  # the exit status
    errors: str  # its stderr
    folder: Path  # contains the run's folder

    @property
    def run_dir(self) -> Path:
        """Return the run's own folder."""
        return next(path.parent for path in self.folder.glob("run/*/config.yaml"))

    @property
    def has_crashed(self) -> bool:
        """Return whether the run hung, or ended by an exception instead of an error message."""
        return self.status not in (0, 1) or "traceback" in self.errors.lower()

    @property
    def message(self) -> str:
        """Return the lines of its error message, or the last line of a traceback."""
        if self.status == HANGS:
            return "was killed, because it took ten times as long as one process"
        lines = [line.rstrip() for line in self.errors.splitlines() if not NOISE.search(line)]
        raised = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception)", line)]
        return raised[-1] if raised and self.has_crashed else "\n".join(lines[-4:])


class ExperimentRuns:
    """Start runs of one experiment, each in its own folder.

    Args:
        overrides: those of train.py.
        folder: the folder for the runs' folders.

    Raises:
        UserError: an override is wrong, or sets a key that the comparison varies.
    """

    timeout = 86_400.0  # seconds after which a run counts as hanging

    def __init__(self, overrides: Sequence[str], folder: Path) -> None:
        values = {each.lstrip("+").partition("=")[0]: each.partition("=")[2] for each in overrides}
        if varied := values.keys() & VARIED:
            raise UserError(
                f"This command sets {min(varied)} for each run. Leave out {min(varied)}, and "
                'choose strategies with --strategies "ddp(4)".'
            )
        self.precision = values.get("trainer.precision", "64-true")
        if self.precision not in ("64-true", "32-true"):
            raise UserError(
                f"trainer.precision={self.precision} rounds too much for a comparison. "
                "Use 64-true or 32-true."
            )
        # Every strategy gets these settings. A strategy that lacks a setting refuses the run.
        self.settings = [each for each in overrides if each.lstrip("+").startswith(STRATEGY)]
        self.overrides = [each for each in overrides if each not in self.settings]
        command = compose_command("train", [*self.overrides, *overrides_of(ALONE)[0]])
        check(command)
        cfg, self.num_steps = command.cfg, int(values.get("trainer.max_steps", 6))
        if self.num_steps < 4:
            raise UserError(f"trainer.max_steps={self.num_steps} is too small. Use 4 or more.")
        # Five batches: neither two nor three ranks divide them evenly.
        num_batches = 3 * cfg.trainer.get("accumulate_grad_batches", 1)
        added = [f"++trainer.max_{key}={self.num_steps}" for key in ("steps", "epochs")]
        for stage, number in {"train": num_batches, "val": 5, "test": 5}.items():
            key = f"trainer.limit_{stage}_batches"
            added += [f"++{key}={number}"] * (key not in values)
        added += [f"logger.{key}=null" for key in cfg.logger or {}]
        added += ["callbacks.throughput=null"] * ("throughput" in (cfg.callbacks or {}))
        added += ["data.num_workers=0"] * (OmegaConf.select(cfg, "data.num_workers") == "auto")
        self.overrides += added
        self.folder = folder
        self.accelerator = "trainer.accelerator=" + values.get("trainer.accelerator", "cpu")

    def start(self, strategy: str, *overrides: str, name: str = "") -> EndedRun:
        """Train from the start, with more overrides, into a folder of this name."""
        folder = self.folder / (name or re.sub(r"\W+", "_", strategy))
        overrides = (*self.overrides, *SHORT, f"trainer.precision={self.precision}", *overrides)
        return self._run(strategy, folder, *overrides, f'output_dir="{folder}"')

    def resume(self, ended: EndedRun, strategy: str) -> EndedRun:
        """Resume a copy of a run from its newest checkpoint."""
        folder = self.folder / re.sub(r"\W+", "_", f"resume {strategy}")
        shutil.copytree(ended.folder, folder, symlinks=True)
        return self._run(strategy, folder, f'resume="{ended._replace(folder=folder).run_dir}"')

    def _run(self, strategy: str, folder: Path, *overrides: str) -> EndedRun:
        how = "resume, " * folder.name.startswith("resume")
        print(f"running: {how}{strategy}", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        from lightning_fabric.plugins.environments.lightning import find_free_network_port

        port = str(find_free_network_port())
        strategy_overrides, num_nodes = overrides_of(strategy)
        program = ["train.py"] if Path("train.py").is_file() else ["-m", "harness", "train"]
        program += [*overrides, self.accelerator, *strategy_overrides]
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
        nodes = [EndedRun(*end, folder) for end in zip(statuses, texts, strict=True)]
        # If one node ends with an error message, the others crash: return the node with a message.
        return min(nodes, key=lambda node: (node.status == 0, node.has_crashed))


def start_program(arguments: list[str], env: dict[str, str], path: Path) -> Any:
    """Start Python in its own process group. Tests replace this function by a faster one.

    Its output goes to `path` with the suffixes ``.out`` and ``.err``.
    """
    with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
        settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=env, stdout=out, stderr=err, **settings)
