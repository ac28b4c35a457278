"""Be a command: find out what this process was started for, and end with what a user can read.

In: the words behind ``train.py``. Out: the exit status. Next: ``compose``, then ``start``; a rank
that the first process of a run has started begins at ``start.compute``.
Nothing here imports torch: ``--help``, ``--cfg job``, completion and mistakes answer at once.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hydra

from harness import allowed, record
from harness.command import run_folder, sweep, which_run
from harness.command.compose import as_hydra_reads, compose_command
from harness.command.explain import nearest
from harness.command.start import compute, compute_in, start
from harness.errors import TrainingError, UserError
from harness.files import FULL
from harness.processes import launch, leaving
from harness.processes.leaving import AgreedExit, leave

# Less than processes.peers.GRACE_SECONDS, after which the first process gives up waiting.
TELL_SECONDS = 1.0
COMPLETION = {"-sc", "--shell-completion"}
SHOWING = {"-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info"} | COMPLETION
FLAGS = SHOWING | {"-p", "--package", "--resolve"}


def main(task: str, conf: str | Path, arguments: Sequence[str] | None = None) -> None:
    """Run ``train``, ``evaluate`` or ``predict`` with the command line's words.

    Args:
        task: one of the three.
        conf: the folder of the config files.
        arguments: the words; by default those behind the script's name.

    Raises:
        SystemExit: with a message where the command is a mistake.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    launch.follow_parent()  # again, for a process that was forked after the imports
    leaving.answer_signals()
    job = launch.folder_of_job()
    try:
        allowed.follow(conf)
        enter(task, Path(conf).resolve(), words, job)
    except AgreedExit as agreed:
        leave(agreed.code)  # all is written; data workers and libraries may take seconds to end
    except TrainingError:
        leave(1)  # it was logged where it was found; other processes may wait for this one
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if job is not None and launch.global_rank() == 0:
            record.note(job, status="failed", reason=str(error).partition("\n")[0])
        tell_once(str(error))
    except Exception as error:
        tell_of_user(error)
        raise


def enter(task: str, conf: Path, words: list[str], job: Path | None) -> None:
    """Do what this process was started for: as a rank of a run, as a job, or by a person.

    ``job`` is the folder that a sweep has given to this job; without words a config is there.
    """
    if run_dir := launch.folder_of_run():
        compute(task, run_folder.load_next_config(run_dir))
        leaving.set_parent_signal(0)  # all is done, and the first process may end earlier
    elif job is not None and not words:
        with which_run.locked(job):
            compute_in(job, task, run_folder.load_config(job))
    elif job is not None:
        command = compose_command(task, words, conf)
        command.sweep_dir = str(job)
        start(command)
    elif {*sweep.MULTIRUN} & {*words}:
        sweep.run(task, conf, words)
    elif any(word.startswith("-") for word in words):
        show(task, conf, words)
    else:
        start(compose_command(task, words, conf))


def show(task: str, conf: Path, words: list[str]) -> NoReturn:
    """Let Hydra answer ``--help``, ``--cfg``, ``--info`` and completion.

    Raises:
        UserError: for other flags, and for mistakes in the words.
    """
    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    for flag in sorted(flags - FLAGS):
        hint = nearest(flag.lstrip("-"), task, [], conf).replace("?", "=<value>?")
        raise UserError(
            f"There is no flag {flag} here.{hint}\n--help, --cfg job and -m are some; a command "
            "has its own config, and hydra.searchpath=[file://<folder>] adds a folder."
        )
    if not flags & SHOWING:
        raise UserError(f"{' '.join(flags)} has no use without --cfg job.")
    if not flags & COMPLETION:
        settings = [word for word in words if "=" in word and not word.startswith("-")]
        compose_command(task, settings, conf)  # says what is wrong, and what Hydra may not call
    sys.argv[1:] = as_hydra_reads(task, words, conf)
    hydra.main(config_path=str(conf), config_name=task, version_base="1.3")(lambda cfg: None)()
    sys.exit(0)


def tell_of_user(error: Exception) -> None:
    """Exit with a few lines if the user's code is to blame; another bug keeps its traceback."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return
    from harness.run import mistakes  # torch; what comes here has mostly imported it

    if message := mistakes.of_user(error):
        # What has failed speaks again when it is closed: a device, and workers that never began.
        tell_once(message, leaves_at_once="CUDA error" in message or "/dev/shm" in message)
    if isinstance(error, OSError) and error.errno in FULL:
        file = error.filename or "A file"
        tell_once(
            f"{file} was not written: {error.strerror}.\n"
            "Free space on its disk; a run goes on with resume=auto."
        )
    # An error of the connection is what another process's failure looks like from here.
    if launch.global_rank() and leaving.first_has_failed.wait(TELL_SECONDS):
        leave(1)


def tell_once(message: str, leaves_at_once: bool = False) -> NoReturn:
    """Exit with a message; of several processes that find the same mistake the first one tells.

    Its end ends the others, by torchrun or by the kernel. A process that lives on has found
    something of its own.
    """
    if rank := launch.global_rank():
        if leaving.first_has_failed.wait(TELL_SECONDS):
            leave(1)
        message = message if message.startswith("Rank ") else f"Rank {rank}: {message}"
    if leaves_at_once:
        print(message, file=sys.stderr)
        leave(1)
    sys.exit(message)
