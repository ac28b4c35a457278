"""From a command to a run: compose, check, choose the folder, freeze the config, execute.

Nothing here imports torch: ``--help``, ``--cfg job``, completion and mistakes answer at once.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig, OmegaConf

from harness.command import gpus, resume, run_folder, validate
from harness.command.compose import Command, compose_command, explained
from harness.command.flags import MULTIRUN, let_hydra_answer, without_flags
from harness.command.hydra_job import job_callbacks, run_callbacks
from harness.errors import TrainingError, UserError
from harness.files import write_durably
from harness.processes import launch, leaving
from harness.processes.leaving import AgreedExit, leave

# Less than processes.peers.GRACE_SECONDS, after which the first process gives up waiting.
TELL_SECONDS = 1.0


class JobFailedError(UserError):
    """A run that was executed by a program of its own has failed."""


def main(task: str, conf: str | Path, arguments: Sequence[str] | None = None) -> None:
    """Run ``train``, ``evaluate`` or ``predict`` with the command line's words.

    Args:
        task: one of the three.
        conf: the folder of the config files.
        arguments: the words; by default those behind the script's name.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    leaving.answer_signals()
    try:
        if run_dir := launch.run_that_this_is_a_rank_of():
            leaving.die_with_parent(parent=os.getppid())
            execute(task, run_folder.load_config(run_dir))
        elif run_dir := launch.job_that_this_is():
            leaving.die_with_parent(signal.SIGTERM)  # saves before it ends
            execute_in(run_dir, task, run_folder.load_config(run_dir), program=())
        else:
            words = without_flags(arguments)
            if any(word.startswith("-") or word == MULTIRUN for word in words):
                let_hydra_answer(task, Path(conf).resolve(), words, start)
            else:
                command = compose_command(task, words, conf)
                if command.is_sweep:
                    let_hydra_answer(task, command.conf, ["--multirun", *words], start)
                else:
                    with run_callbacks(command) as command:
                        start(command)
    except AgreedExit as agreed:
        leave(agreed.code)  # all is written; data workers and libraries may take seconds to end
    except TrainingError:
        leave(1)  # it was logged where it was found; other processes may wait for this one
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        tell_once(str(error))
    except Exception as error:
        tell_of_owner(error)
        raise


def tell_of_owner(error: Exception) -> None:
    """Exit with a few lines if the owner's code is to blame; another bug keeps its traceback."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return
    from harness.run import mistakes  # torch; what comes here has mostly imported it

    if message := mistakes.of_owner(error):
        if "CUDA error" in message:  # a device that has failed speaks again when it is closed
            print(message, file=sys.stderr)
            leave(1)
        tell_once(message)
    # An error of the connection is what another process's failure looks like from here.
    if launch.global_rank() and leaving.first_has_failed.wait(TELL_SECONDS):
        leave(1)


def tell_once(message: str) -> NoReturn:
    """Exit with a message; of several processes that find the same mistake the first one tells.

    Its end ends the others, by torchrun or by the kernel. A process that lives on has found
    something of its own.
    """
    if rank := launch.global_rank():
        if leaving.first_has_failed.wait(TELL_SECONDS):
            leave(1)
        message = f"Rank {rank}: {message}"
    sys.exit(message)


def start(command: Command, program: Sequence[str] = ()) -> Path:
    """Check a command, make its folder, freeze the config in it, and execute it.

    Args:
        command: composed.
        program: executes the job in a process of its own, which starts with free devices and
            with no process group of a job before; else this process executes it.

    Returns:
        The run's folder.

    Raises:
        UserError: where it cannot run; then no folder is left.
    """
    with explained(command.task, command.overrides, command.conf):
        validate.check(command)
    cfg = command.cfg
    if command.task == "train":
        cfg.name = str(cfg.name or command.choices.get("experiment") or "default")
        if run_dir := resume.find(cfg, is_sweep=command.is_sweep):
            return go_on(command, run_dir, program)
        parent = Path(cfg.output_dir, cfg.name)
        if cfg.resume == "auto" and launch.global_rank() == 0:
            print(resume.nothing_to_go_on_with(parent))
        cfg.resume = None
    else:
        trained = run_folder.config_of_checkpoint(Path(cfg.checkpoint)).parent
        parent = Path(cfg.output_dir or trained, command.task)
    if command.sweep_dir:
        run_dir = Path(command.sweep_dir)
    else:
        run_dir = run_folder.choose(parent, cfg.trainer.num_nodes)
    frozen = run_folder.freeze(cfg, run_dir)
    try:
        if launch.global_rank() == 0:
            run_folder.save_config(frozen, run_dir)
            words = OmegaConf.to_yaml(OmegaConf.create(command.overrides))
            write_durably(run_dir / "overrides.yaml", words.encode())
        with job_callbacks(command, run_dir, start):
            execute_in(run_dir, command.task, frozen, program)
    except JobFailedError:
        raise  # its folder has its log
    except UserError:
        if launch.global_rank() == 0:
            run_folder.remove_unused(run_dir)
        raise
    return run_dir


def go_on(command: Command, run_dir: Path, program: Sequence[str]) -> Path:
    """Continue a run in its own folder, with its own config.

    Raises:
        UserError: if the command asks for another result, or no whole checkpoint is left; the
            folder stays as it was.
    """
    with nullcontext() if program else run_folder.locked(run_dir):  # the program locks it itself
        frozen = resume.config(command, run_dir)
        if resume.is_finished(frozen, run_dir, command.rules["may_grow"]):
            print(resume.finished(run_dir))
            return run_dir
        with kept_if_refused(run_dir / "config.yaml", run_dir / "results.json"):
            if launch.global_rank() == 0:
                # In this order: another process may still ask whether the run has finished.
                (run_dir / "results.json").unlink(missing_ok=True)
                run_folder.save_config(frozen, run_dir)
            with job_callbacks(command, run_dir, start):
                execute_in(run_dir, "train", frozen, program)
    return run_dir


@contextmanager
def kept_if_refused(*paths: Path) -> Iterator[None]:
    """Give files back what was in them, should the command turn out to be a mistake."""
    before = {path: path.read_bytes() for path in paths if path.exists()}
    try:
        yield
    except JobFailedError:
        raise
    except UserError:
        if launch.global_rank() == 0:
            for path, data in before.items():
                write_durably(path, data)
        raise


def execute_in(run_dir: Path, task: str, frozen: DictConfig, program: Sequence[str]) -> None:
    """Execute a run in its folder, here or by a program of its own.

    Raises:
        JobFailedError: if the program has failed; it has said why.
    """
    if not program:
        with run_folder.locked(run_dir), launch.telling_ranks(run_dir):
            execute(task, frozen)
    elif code := wait_for(subprocess.Popen(program, env=launch.job_environment(run_dir))):
        raise JobFailedError(f"The run in {run_dir} ended with exit status {code}.")


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """The exit status of a process; Ctrl-C lets it finish its step and save."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise


def execute(task: str, frozen: DictConfig) -> None:
    """Train, evaluate or predict with a frozen config."""
    cfg = run_folder.resolved(frozen)
    if not launch.is_rank_of_a_run():  # else the first process has chosen for this one
        gpus.choose(cfg)
    from harness.run import tasks  # torch and Lightning; seconds

    getattr(tasks, task)(cfg)
