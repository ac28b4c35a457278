"""From a command to a run: compose, check, choose the folder, freeze the config, go.

Nothing here imports torch: ``--help``, ``--cfg job``, completion and mistakes answer at once.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.command import explain, resume, run_folder, validate
from harness.command.compose import CONF, store_training_config
from harness.errors import TrainingError, UserError
from harness.files import write_durably
from harness.processes import leaving, orphans
from harness.processes.leaving import AgreedExit, leave

# Less than processes.peers.GRACE_SECONDS, after which the first process gives up waiting.
TELL_SECONDS = 1.0


def main(task: str) -> None:
    """Run ``train``, ``evaluate`` or ``predict`` with the command line's overrides."""
    try:
        if run_folder.VARIABLE in os.environ:
            # A run has started this process: it takes that run's config, and composes no second.
            run_dir = Path(os.environ[run_folder.VARIABLE])
            if orphans.has_launched_itself():
                orphans.die_with_parent(parent=int(os.environ[run_folder.LAUNCHER]))
                execute(task, run_folder.load_config(run_dir))
            else:  # a job of a sweep
                with run_folder.locked(run_dir):
                    execute_here(task, run_folder.load_config(run_dir))
        else:
            compose_and_start(task)
    except AgreedExit as agreed:
        leave(agreed.code)  # all is written; data workers and libraries may take seconds to end
    except TrainingError:
        leave(1)  # it was logged where it was found; other processes may wait for this one
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        tell_once(str(error))


def tell_once(message: str) -> NoReturn:
    """Exit with a message; of several processes that find the same mistake the first one tells.

    Its end ends the others, by torchrun or by the kernel. A process that lives on has found
    something of its own.
    """
    if rank := run_folder.global_rank():
        time.sleep(TELL_SECONDS)
        message = f"Rank {rank}: {message}"
    sys.exit(message)


@dataclass
class Command:
    """One composed command, with what Hydra knows about it."""

    task: str
    cfg: DictConfig
    overrides: list[str]
    choices: dict[str, str | None]
    sweep_dir: str | None  # the folder that a sweep gave to this job


def compose_and_start(task: str) -> None:
    """Let Hydra compose the command, and start what it describes.

    A sweep's jobs start inside Hydra, which counts them and collects their results. A single
    run starts after Hydra has returned: an error is then ours to tell, and Lightning starts
    processes as for any script.
    """
    if task != "train":
        take_training_config(sys.argv)
    single: list[Command | UserError] = []

    def take(cfg: DictConfig) -> Any:
        hydra_cfg = HydraConfig.get()
        overrides = list(hydra_cfg.overrides.task)
        is_sweep = hydra_cfg.mode == RunMode.MULTIRUN
        command = Command(
            task,
            cfg,
            overrides,
            dict(hydra_cfg.runtime.choices),
            hydra_cfg.runtime.output_dir if is_sweep else None,
        )
        try:
            validate.check(cfg, task, overrides)
        except UserError as error:
            if is_sweep:
                raise
            single.append(error)
            return None
        if is_sweep:
            return start(command)
        single.append(command)
        return None

    # Hydra takes "seed=1 -m model=mlp" only with the flag in front.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    explain.refuse_numbers_of_gpus(overrides)
    sweeps = run_folder.sweeps(overrides)
    before = set(sweeps.glob("*"))
    try:
        with hydra_raises():
            hydra.main(config_path=str(CONF), config_name=task, version_base="1.3")(take)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        run_folder.remove_unstarted(set(sweeps.glob("*")) - before)
        raise UserError(explain.explain(error, task, overrides)) from error
    except UserError:
        run_folder.remove_unstarted(set(sweeps.glob("*")) - before)
        raise
    except OSError as error:
        raise UserError(
            f"The sweep's folder cannot be made: {error}.\n"
            "Choose a folder that you may write to with output_dir=<folder>."
        ) from error
    for command in single:
        if isinstance(command, UserError):
            raise command
        start(command)


@contextmanager
def hydra_raises() -> Iterator[None]:
    """Let Hydra raise its errors; by default it prints them and exits."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def take_training_config(argv: list[str]) -> None:
    """Let the command compose the data and the model of its checkpoint's run."""
    for i, argument in enumerate(argv):
        key, _, value = argument.partition("=")
        if key == "checkpoint":
            path = value[1:-1] if value[:1] in ("'", '"') and value[-1:] == value[:1] else value
            # Hydra wants quotes around names like epoch=3.ckpt.
            argv[i] = "checkpoint='{}'".format(path.replace("'", "\\'"))
            store_training_config(validate.training_config(Path(path)))


def start(command: Command) -> Any:
    """Make the folder of a checked command, freeze the config in it, and execute it.

    Raises:
        UserError: where it cannot run; then no folder is left.
    """
    cfg = command.cfg
    if command.task == "train":
        cfg.name = str(cfg.name or command.choices.get("experiment") or "default")
        if run_dir := resume.find(cfg, is_sweep=command.sweep_dir is not None):
            return go_on(command, run_dir)
        cfg.resume = None
        parent = Path(cfg.output_dir, cfg.name)
    else:
        trained = validate.training_config(Path(cfg.checkpoint)).parent
        parent = Path(cfg.output_dir or trained, command.task)
    if command.sweep_dir:
        run_dir = Path(command.sweep_dir)
    else:
        run_dir = run_folder.choose(parent, cfg.trainer.num_nodes)
    frozen = run_folder.freeze(cfg, run_dir)
    if run_folder.global_rank() == 0:
        run_folder.save_config(frozen, run_dir)
        words = OmegaConf.to_yaml(OmegaConf.create(command.overrides))
        write_durably(run_dir / "overrides.yaml", words.encode())
    try:
        if command.sweep_dir:
            return execute_apart(run_dir, cfg.get("objective"))
        with run_folder.locked(run_dir):
            return execute_here(command.task, frozen)
    except UserError:
        if run_folder.global_rank() == 0:
            run_folder.remove_unused(run_dir)
        raise


def go_on(command: Command, run_dir: Path) -> Any:
    """Continue a run in its own folder, with its own config.

    Raises:
        UserError: if the command asks for another result, or no whole checkpoint is left; the
            folder stays as it was.
    """
    with run_folder.locked(run_dir):
        frozen = resume.config(command.cfg, command.overrides, run_dir)
        if resume.is_finished(frozen, run_dir):
            print(resume.finished(run_dir))
            return None
        with kept_if_refused(run_dir / "config.yaml", run_dir / "results.json"):
            if run_folder.global_rank() == 0:
                # In this order: another process may still ask whether the run has finished.
                (run_dir / "results.json").unlink(missing_ok=True)
                run_folder.save_config(frozen, run_dir)
            return execute_here("train", frozen)


@contextmanager
def kept_if_refused(*paths: Path) -> Iterator[None]:
    """Give files back what was in them, should the command turn out to be a mistake."""
    before = {path: path.read_bytes() for path in paths if path.exists()}
    try:
        yield
    except UserError:
        if run_folder.global_rank() == 0:
            for path, data in before.items():
                write_durably(path, data)
        raise


def execute_apart(run_dir: Path, objective: str | None) -> Any:
    """Execute one job of a sweep in a process of its own, and return what the sweep optimises.

    A fresh process starts with free devices and no process group of the job before; and the
    processes that it starts in turn re-run a job, not the sweep.
    """
    environment = {key: os.environ[key] for key in os.environ if key != "HYDRA_FULL_ERROR"}
    environment[run_folder.VARIABLE] = str(run_dir)
    script = os.path.abspath(sys.argv[0])
    code = subprocess.run([sys.executable, script], env=environment).returncode
    if code:
        raise UserError(f"The run in {run_dir} ended with exit status {code}.")
    results = json.loads((run_dir / "results.json").read_text())
    return results.get(objective)


def execute_here(task: str, frozen: DictConfig) -> Any:
    """Execute a run whose further processes find its folder in the environment."""
    os.environ[run_folder.VARIABLE] = frozen.run_dir
    os.environ[run_folder.LAUNCHER] = str(os.getpid())
    try:
        return execute(task, frozen)
    finally:
        del os.environ[run_folder.VARIABLE], os.environ[run_folder.LAUNCHER]


def execute(task: str, frozen: DictConfig) -> Any:
    """Train, evaluate or predict with a frozen config."""
    leaving.answer_signals()
    cfg = run_folder.resolved(frozen)
    if not orphans.has_launched_itself():  # else the first process has chosen for this one
        choose_gpus(cfg)
    from harness.run import tasks  # torch and Lightning; seconds

    return getattr(tasks, task)(cfg)


def choose_gpus(cfg: Any) -> None:
    """Take the GPUs that the config asks for, and say which they are.

    Raises:
        UserError: if they cannot be had.
    """
    if "gpus" not in cfg or cfg.gpus.order == "visible":  # a run of before there was a choice
        return
    validate.check_gpus(cfg)
    from harness.machine import choice, nvml

    devices = cfg.trainer.devices
    num_wanted = None if devices in (-1, "auto") else int(devices)
    chosen = choice.take_emptiest(num_wanted, cfg.gpus.min_free_gib)
    for index, gpu in enumerate(chosen):
        free = f"{nvml.gib(gpu.free_bytes)} of {nvml.gib(gpu.total_bytes)} free"
        print(f"cuda:{index} is GPU {gpu.number}: {gpu.name}, {free}")
