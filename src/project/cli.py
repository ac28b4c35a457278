"""From a command to a run: compose, check, choose the folder, freeze the config, go.

Nothing here imports torch: ``--help``, ``--cfg job``, completion and mistakes answer at once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from project import checks, resume, run_folder
from project.composition import CONF, store_training_config
from project.errors import MachineError, TrainingError, UserError
from project.processes import orphans
from project.processes.leaving import AgreedExit, leave


def main(task: str) -> None:
    """Run ``train``, ``evaluate`` or ``predict`` with the command line's overrides."""
    try:
        if run_folder.VARIABLE in os.environ:
            if orphans.has_launched_itself():
                orphans.die_with_parent()
            # A run has started this process: it takes that run's config, and composes no second.
            config = Path(os.environ[run_folder.VARIABLE], "config.yaml")
            execute(task, OmegaConf.load(config))
        else:
            compose_and_start(task)
    except AgreedExit as agreed:
        leave(agreed.code)  # all is written; data workers and libraries may take seconds to end
    except TrainingError:
        leave(1)  # it was logged where it was found; other processes may wait for this one
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        # Under torchrun and srun every process finds the mistake; the first one tells.
        is_first = run_folder.global_rank() == 0
        sys.exit(str(error) if is_first or isinstance(error, MachineError) else 1)


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
            checks.check(cfg, task, overrides)
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
    checks.refuse_numbers_of_gpus(overrides)
    sweeps = run_folder.sweeps(overrides)
    before = set(sweeps.glob("*"))
    try:
        with hydra_raises():
            hydra.main(config_path=str(CONF), config_name=task, version_base="1.3")(take)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        run_folder.remove_unstarted(set(sweeps.glob("*")) - before)
        raise UserError(checks.explain(error, task, overrides)) from error
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
            store_training_config(checks.training_config(Path(path)))


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
        trained = checks.training_config(Path(cfg.checkpoint)).parent
        parent = Path(cfg.output_dir or trained, command.task)
    if command.sweep_dir:
        run_dir = Path(command.sweep_dir)
    else:
        run_dir = run_folder.choose(parent, cfg.trainer.num_nodes)
    cfg.run_dir = str(run_dir)
    frozen = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    if run_folder.global_rank() == 0:
        run_folder.save_config(frozen, run_dir)
        OmegaConf.save(OmegaConf.create(command.overrides), run_dir / "overrides.yaml")
    os.environ[run_folder.VARIABLE] = cfg.run_dir  # for the processes of this run
    try:
        return execute_apart(cfg) if command.sweep_dir else execute(command.task, frozen)
    except UserError:
        if run_folder.global_rank() == 0:
            run_folder.remove_unused(run_dir)
        raise
    finally:
        del os.environ[run_folder.VARIABLE]


def go_on(command: Command, run_dir: Path) -> Any:
    """Continue a run in its own folder, with its own config.

    Raises:
        UserError: if the command asks for another result, or no whole checkpoint is left; the
            folder stays as it was.
    """
    frozen = resume.config(command.cfg, command.overrides, run_dir)
    if resume.is_finished(frozen, run_dir):
        print(resume.finished(run_dir))
        return None
    before = (run_dir / "config.yaml").read_text()
    if run_folder.global_rank() == 0:
        (run_dir / "results.json").unlink(missing_ok=True)
        run_folder.save_config(frozen, run_dir)
    os.environ[run_folder.VARIABLE] = str(run_dir)
    try:
        return execute("train", frozen)
    except UserError:
        if run_folder.global_rank() == 0:
            (run_dir / "config.yaml").write_text(before)
        raise
    finally:
        del os.environ[run_folder.VARIABLE]


def execute_apart(cfg: DictConfig) -> Any:
    """Execute one job of a sweep in a process of its own, and return what the sweep optimises.

    A fresh process starts with free devices and no process group of the job before; and the
    processes that it starts in turn re-run a job, not the sweep.
    """
    environment = {key: os.environ[key] for key in os.environ if key != "HYDRA_FULL_ERROR"}
    script = os.path.abspath(sys.argv[0])
    code = subprocess.run([sys.executable, script], env=environment).returncode
    if code:
        raise UserError(f"The run in {cfg.run_dir} ended with exit status {code}.")
    results = json.loads(Path(cfg.run_dir, "results.json").read_text())
    return results.get(cfg.get("objective"))


def execute(task: str, cfg: Any) -> Any:
    """Train, evaluate or predict with a frozen config."""
    if not orphans.has_launched_itself():  # else the first process has chosen for this one
        choose_gpus(cfg)
    from project import run  # torch and Lightning; seconds

    return getattr(run, task)(cfg)


def choose_gpus(cfg: Any) -> None:
    """Take the GPUs that the config asks for, and say which they are.

    Raises:
        UserError: if they cannot be had.
    """
    if "gpus" not in cfg or cfg.gpus.order == "visible":  # a run of before there was a choice
        return
    checks.check_gpus(cfg)
    from project.devices import choice, nvml

    devices = cfg.trainer.devices
    num_wanted = None if devices in (-1, "auto") else int(devices)
    chosen = choice.take_emptiest(num_wanted, cfg.gpus.min_free_gib)
    for index, gpu in enumerate(chosen):
        free = f"{nvml.gib(gpu.free_bytes)} of {nvml.gib(gpu.total_bytes)} free"
        print(f"cuda:{index} is GPU {gpu.number}: {gpu.name}, {free}")
