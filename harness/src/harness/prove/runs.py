"""Short runs of the owner's experiment, each a command as a person would type it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.command import validate
from harness.command.compose import compose_command
from harness.errors import UserError
from harness.prove.records import Records
from harness.prove.verdicts import BROKEN, REFUSED, Verdict

RECORDER = "harness.prove.recording.Recorder"
SETTING = "trainer.strategy."
OF_DDP = ("ddp", "ddp2")
HAVE_IT = {  # which strategies have a setting; ddp and ddp2 any other
    "modules": ("dp", "ddp2", "fsdp"),
    **dict.fromkeys(("whole_inputs", "scalar_outputs", "check_forward"), ("dp", "ddp2")),
    **dict.fromkeys(("blocks", "reshard_after_forward"), ("fsdp",)),
}
MOST_SAID = 4  # lines of a refusal
NOISE = re.compile(
    r"(?i)warn|^\s*(GPU|TPU|HPU|💡|\[|INFO|Seed|Initializing|distributed_backend|All dist)|^-+$"
)
# In run.log.
WARNING = re.compile(r"^[-\d]+ [:,\d]+ WARNING harness\S*: (.*?)(?=^\d{4}-|\Z)", re.M | re.S)
DIFFERS = re.compile(r"others than those of one process|not what one process would have")


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
    found = re.fullmatch(r"(dp|ddp|ddp2|fsdp)\((?:(\d+)x)?(\d+)\)", name)
    if not found or (found[2] and found[1] in ("dp", "fsdp")) or int(found[3]) < 1:
        raise UserError(f"--strategies {name}: use names such as dp(2), ddp(3) or ddp2(2x2).")
    kind, num_nodes, devices = found[1], int(found[2] or 1), int(found[3])
    words = (f"strategy={kind}", f"trainer.devices={devices}", f"trainer.num_nodes={num_nodes}")
    per_node = devices if kind in ("ddp", "fsdp") else 1
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
    def told(self) -> str:
        """Its own warning that the result is not that of one process; empty without one."""
        log = (self.run_dir / "run.log").read_text()
        found = (text for text in WARNING.findall(log) if DIFFERS.search(text))
        return next(found, "").strip()

    @property
    def is_refused(self) -> bool:
        """Whether it ended with a sentence; an exception names the file of its traceback."""
        return self.status == 1 and "traceback" not in self.said.lower()

    @property
    def sentence(self) -> str:
        """The last that it said."""
        lines = [line.rstrip() for line in self.said.splitlines() if line.strip()]
        if "Traceback (most recent call last)" not in self.said:
            # The line below a warning is code.
            lines = [line for line in lines if line[0] != " " and not NOISE.search(line)]
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
    """

    words: Sequence[str]
    folder: Path
    num_steps: int
    timeout: float
    precision: str = "64-true"

    def __post_init__(self) -> None:
        chosen = {"strategy", "trainer.devices", "trainer.num_nodes", "trainer.strategy"}
        typed = {word.lstrip("+").partition("=")[0] for word in self.words}
        if "trainer.precision" in typed:
            raise UserError("trainer.precision is tried here: use --precision 32-true instead.")
        if "resume" in typed:
            raise UserError("resume= goes on with a run, and here short ones begin: leave it out.")
        if found := sorted(chosen & typed):
            raise UserError(f'{found[0]} is what is tried here: use --strategies "ddp(4)" instead.')
        # Settings of a strategy are those of some, and of none in one process.
        self.of_strategy = [word for word in self.words if word.lstrip("+").startswith(SETTING)]
        self.words = [word for word in self.words if word not in self.of_strategy]
        command = compose_command("train", [*self.words, *ALONE.words])
        validate.check(command)
        cfg: Any = command.cfg
        self.has_sync_batchnorm = bool(cfg.trainer.sync_batchnorm)
        self.accelerator = cfg.trainer.accelerator if "trainer.accelerator" in typed else "cpu"
        trainer = {
            "accelerator": self.accelerator,
            "max_steps": self.num_steps,
            "max_epochs": self.num_steps,
            "max_time": "null",
            "val_check_interval": "null",
            "check_val_every_n_epoch": 1,
            "limit_train_batches": "null",
            "num_sanity_val_steps": 0,
            "enable_progress_bar": "false",
            "enable_model_summary": "false",
            "log_every_n_steps": 1,
        }
        # Batches that two and three processes share unevenly; what was typed is the owner's choice.
        limits = {"limit_val_batches": 5, "limit_test_batches": 5}
        trainer |= {key: n for key, n in limits.items() if f"trainer.{key}" not in typed}
        self.common: list[str] = [
            *(
                f"{'' if key in cfg.trainer else '+'}trainer.{key}={v}"
                for key, v in trainer.items()
            ),
            *(f"logger.{key}=null" for key in cfg.logger or {}),
            *(["callbacks.throughput=null"] if "throughput" in (cfg.callbacks or {}) else []),
            "checkpoint={every_n_steps:1,num_kept:1000}",
            "name=run",
            f"+callbacks.prove._target_={RECORDER}",
            "+callbacks.prove.folder=${run_dir}/prove",
        ]
        if OmegaConf.select(cfg, "data.num_workers") == "auto":
            self.common.append("data.num_workers=0")

    def settings_of(self, how: Strategy) -> list[str]:
        """What the owner has typed for strategies, as far as it is for this one."""
        words = {word.lstrip("+"): word.partition(SETTING)[2] for word in self.of_strategy}
        keys = {word: rest.partition("=")[0] for word, rest in words.items()}
        return [f"++{w}" for w, key in keys.items() if how.kind in HAVE_IT.get(key, OF_DDP)]

    def start(self, name: str, how: Strategy, *words: str, **recorder: Any) -> Ended:
        """Train from the start, into a folder of this name."""
        more = [f"+callbacks.prove.{key}={value}" for key, value in recorder.items()]
        precision = f"trainer.precision={self.precision}"
        folder = self.folder / re.sub(r"\W+", "_", name).strip("_")
        owners = [*self.words, *how.words, *self.settings_of(how)]
        ours = [*self.common, precision, *more, *words, f'output_dir="{folder}"']
        return self._run(how, folder, *owners, *ours)

    def resume(self, ended: Ended, how: Strategy) -> Ended:
        """Go on with a run from its newest checkpoint."""
        accelerator = f"trainer.accelerator={self.accelerator}"
        words = [*how.words, *self.settings_of(how), accelerator]
        return self._run(how, ended.folder, f'resume="{ended.run_dir}"', *words)

    def _run(self, how: Strategy, folder: Path, *words: str) -> Ended:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = ["train.py"] if Path("train.py").is_file() else ["-m", "harness", "train"]
        addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = []
        for node in range(how.num_nodes):
            env = os.environ | (addresses | {"NODE_RANK": str(node)} if how.num_nodes > 1 else {})
            path = folder / f"node_{node}"
            processes.append(start_program([*program, *words], env, path))
        statuses = wait_for_all(processes, self.timeout)
        node = next((i for i, status in enumerate(statuses) if status), 0)
        path = folder / f"node_{node}"
        said = [path.with_suffix(kind).read_text(errors="replace") for kind in (".err", ".out")]
        return Ended(how, statuses[node], said[0].strip() or said[1], folder, words)


def failed_verdict(promise: str, ended: Ended) -> Verdict | None:
    """What is to be said of a run that did not end well; ``None`` if it did."""
    if ended.status == 0:
        return None
    if ended.status == 124:
        why = (
            "likely: some processes call mean_over, self.all_gather or a metric, and others do not"
        )
        return Verdict(
            promise, BROKEN, "the run hangs", why if ended.strategy.num_processes > 1 else ""
        )
    status = REFUSED if ended.is_refused else BROKEN
    said = ended.sentence if ended.is_refused else f"the run ends with {ended.sentence}"
    return Verdict(promise, status, said)


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


def wait_for_all(processes: Sequence[Any], seconds: float) -> list[int]:
    """The exit statuses of processes; 124 of those that had to be killed."""
    end = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > end:
                break
            time.sleep(0.01)
    finally:  # also after Ctrl-C
        for late in [process for process in processes if process.poll() is None]:
            os.killpg(late.pid, signal.SIGKILL)
            late.wait()
            late.returncode = 124
    return [int(process.returncode) for process in processes]
