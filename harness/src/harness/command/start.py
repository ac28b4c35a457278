"""From a command to a run: compose, check, choose the folder, freeze the config, execute.

Nothing here imports torch: ``--help``, ``--cfg job``, completion and mistakes answer at once.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig

from harness import allowed, record
from harness.checkpoints.lookup import NEWEST
from harness.command import gpus, resume, run_folder, sweep, validate
from harness.command.compose import Command, compose_command, explained
from harness.command.flags import MULTIRUN, checked, let_hydra_answer
from harness.command.planning import Plan, known_of, planned, writable
from harness.errors import TrainingError, UserError
from harness.files import FULL, write_durably
from harness.processes import early, launch, leaving
from harness.processes.leaving import AgreedExit, leave
from harness.processes.meeting import Meeting
from harness.quick_imports import quick_imports
from harness.strategies import launchable

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
    launch.follow_launcher()  # again, for a process that was forked after the imports
    leaving.answer_signals()
    job = None
    try:
        allowed.follow(conf)
        if run_dir := launch.run_that_this_is_a_rank_of():
            execute(task, run_folder.load_config(run_dir))
            leaving.arm(0)  # all is done, and the first process may end earlier
        elif run_dir := launch.job_that_this_is():
            job = run_dir
            if arguments:  # of a sweep, whose job composes its own config
                command = compose_command(task, arguments, conf)
                command.sweep_dir = str(run_dir)
                start(command)
            else:
                execute_in(run_dir, task, run_folder.load_config(run_dir), program=())
        else:
            words = checked(arguments)
            if {*MULTIRUN} & {*words}:
                sweep.run(task, Path(conf).resolve(), words)
            elif any(word.startswith("-") for word in words):
                let_hydra_answer(task, Path(conf).resolve(), words)
            else:
                start(compose_command(task, words, conf))
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
        tell_of_owner(error)
        raise


def tell_of_owner(error: Exception) -> None:
    """Exit with a few lines if the owner's code is to blame; another bug keeps its traceback."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return
    from harness.run import mistakes  # torch; what comes here has mostly imported it

    if message := mistakes.of_owner(error):
        # What has failed speaks again when it is closed: a device, and workers that never began.
        tell_once(message, leaves_at_once="CUDA error" in message or "/dev/shm" in message)
    if isinstance(error, OSError) and error.errno in FULL:
        tell_once(f"{error.filename or 'A file'} was not written: {error.strerror}.\nFree space.")
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


def start(command: Command, program: Sequence[str] = ()) -> Path:
    """Check a command, make its folder, freeze the config in it, and execute it.

    Args:
        command: composed.
        program: executes the job in a process of its own, which starts with free devices and
            with no process group of a job before; else this process executes it.

    Returns:
        The run's folder.

    Raises:
        UserError: where it cannot run; then no folder is left, and a run that it would have gone
            on with stays as it was.
    """
    with explained(command.task, command.overrides, command.conf):
        validate.check(command)
    cfg, plan = command.cfg, Plan("")

    def undo() -> None:
        is_new = plan.run_dir and not plan.goes_on and command.sweep_dir is None
        if is_new and launch.global_rank() == 0:
            run_folder.remove_unused(Path(plan.run_dir))

    if command.task == "train":
        cfg.name = str(cfg.name or command.choices.get("experiment") or "default")
    meeting = Meeting(known_of(cfg.trainer), cfg.join_minutes)
    try:
        with meeting.telling_failure(), ExitStack() as held, ExitStack() as chosen:
            if not meeting.is_alone:
                from harness.command.what_counts import what_counts  # asked for by few

                meeting.compare(what_counts(command))

            def decide() -> dict[str, Any]:
                return asdict(planned(command, meeting.launchers, held, chosen, not program))

            plan = Plan(**meeting.decided(decide))
            run_dir = Path(plan.run_dir)
            if plan.is_finished:
                return run_dir
            held.enter_context(writable(run_dir))
            if plan.goes_on:
                meeting.see(run_dir)
                frozen = resume.config(command, run_dir)
                frozen.resume = plan.checkpoint
                names = ("config.yaml", "results.json", record.FILE)
                held.enter_context(kept_if_refused(*(run_dir / name for name in names)))
            else:
                if command.task == "train":
                    cfg.resume = None
                frozen = run_folder.freeze(cfg, run_dir)
            if launch.global_rank() == 0:
                with writable(run_dir):
                    # In this order: another process may still ask whether the run has finished.
                    (run_dir / "results.json").unlink(missing_ok=True)
                    run_folder.save_config(frozen, run_dir)
                    if not plan.goes_on:
                        run_folder.save_words(command.overrides, run_dir)
            chosen.close()
            if not plan.goes_on:
                meeting.see(run_dir)
            meeting.watch(bool(program), undo)
            execute_in(run_dir, command.task, frozen, program)
    except JobFailedError:
        raise  # its folder has its log
    except UserError:
        undo()
        raise
    return run_dir


@contextmanager
def kept_if_refused(*paths: Path) -> Iterator[None]:
    """Give files back what was in them, should the command turn out to be a mistake."""
    is_first = launch.global_rank() == 0  # the only one that writes them
    before = {path: path.read_bytes() if path.exists() else None for path in paths if is_first}
    newest = paths[0].parent / "checkpoints" / NEWEST
    place = os.path.realpath(newest)

    def give_back() -> None:
        # A run that has trained further is no longer what these files say.
        if os.path.realpath(newest) == place:
            for path, data in before.items():
                if data is None:
                    path.unlink(missing_ok=True)
                else:
                    write_durably(path, data)

    def part(status: int) -> None:
        """Where another process has failed; a full disk keeps nobody from leaving."""
        with suppress(OSError):
            give_back()

    leaving.FAREWELLS.add(part)
    try:
        yield
    except JobFailedError:
        raise
    except UserError:
        give_back()
        raise
    finally:
        leaving.FAREWELLS.discard(part)


def execute_in(run_dir: Path, task: str, frozen: DictConfig, program: Sequence[str]) -> None:
    """Execute a run in its folder, here or by a program of its own.

    Raises:
        JobFailedError: if the program has failed; it has said why.
    """
    if not program:
        with run_folder.locked(run_dir), noted(run_dir), launch.telling_ranks(run_dir):
            execute(task, frozen)
    elif code := wait_for(subprocess.Popen(program, env=launch.job_environment(run_dir))):
        raise JobFailedError(f"The run in {run_dir} ended with exit status {code}.")


def noted(run_dir: Path) -> AbstractContextManager[None]:
    """Let the first process note how a run ends."""
    return nullcontext() if launch.global_rank() else record.recording(run_dir)


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
        early.start(task, launchable.num_further(cfg.trainer))
    with quick_imports():
        from harness.upstream import late_imports

        late_imports.import_torchmetrics()
        from harness.run import tasks  # torch and Lightning; seconds

    early.wait()
    getattr(tasks, task)(cfg)
