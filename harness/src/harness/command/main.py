"""Be a command: find out what this process was started for, and end with what a user can read.

In: the words behind ``train.py``. Out: a run's folder and the exit status. The way of a run:
``compose`` and ``check`` the words, let all processes meet, ``choose_run``, then ``run.train``,
which imports torch. A rank that the first process of a run has started begins at ``compute``.
Until then no torch: ``--help``, ``--cfg job`` and mistakes answer at once.
"""

import gc
import os
import sys
import traceback
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from harness import allowed, record
from harness.command import choose_run, run_folder
from harness.command.check import check
from harness.command.compose import (
    EVALUATION_GROUPS,
    Command,
    compose,
    compose_command,
)
from harness.command.config_files import choices, groups
from harness.command.explain import explained, nearest
from harness.errors import (
    AgreedExit,
    TrainingError,
    UserError,
    outlive_readers,
    print_text,
    printable,
)
from harness.files import FULL, LIBRARY
from harness.machine import choose_emptiest, gib
from harness.names import flat, is_below, shown
from harness.processes import leaving, parent, ranks
from harness.processes.launcher import global_rank, is_child_rank, launcher_of
from harness.processes.leaving import exit_now
from harness.processes.meeting import Rendezvous
from harness.strategies import launchable
from harness.upstream import quick_start
from harness.upstream.interpolations import bounded

MULTIRUN = {"-m", "--multirun", "hydra.mode=MULTIRUN"}
FIRST = ["experiment", "model", "data", "trainer", "strategy"]  # of the groups that help lists
# Keys that differ between ranks by design, and are not compared.
DIFFERS_BY_RANK = ("output_dir", "run_dir", "resume", "checkpoint", "output")


def main(task: str, conf: str | Path, arguments: Sequence[str] | None = None) -> None:
    """Run ``train``, ``evaluate`` or ``predict`` with the command line's words, or with others.

    Raises:
        SystemExit: with a message where the command is a mistake.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if arguments is None:
        outlive_readers()
    parent.follow_parent()  # again, for a process that was forked after the imports
    leaving.exit_on_signals()
    job = parent.folder_of_job()
    try:
        allowed.load_rules(conf)
        enter(task, Path(conf).resolve(), words, job)
    except AgreedExit as agreed:
        leaving.let_rank_0_exit_first()
        exit_now(agreed.code)  # all is written; data workers and libraries may take seconds to end
    except TrainingError:  # it was logged where it was found
        leaving.before_telling(is_mistake=True)
        exit_now(1)
    except UserError as error:
        leaving.before_telling(is_mistake=True)
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if job is not None and global_rank() == 0:
            record.note(job, status="failed", reason=str(error).partition("\n")[0])
        exit_with(str(error))
    except Exception as error:
        leaving.before_telling(is_mistake=False)
        tell_of_user(error)
        if leaving.is_srun_task():
            traceback.print_exc()
            exit_now(1)
        raise


def enter(task: str, conf: Path, words: list[str], job: Path | None) -> None:
    """Do what this process was started for: as a rank of a run, as a job, or by a person.

    ``job`` is the folder that a sweep has given to this job; without words a config is there.
    """
    if run_dir := parent.folder_of_run():
        compute(task, run_folder.load_next_config(run_dir))
        leaving.set_parent_signal(0)  # all is done, and the first process may end earlier
    elif job is not None and not words:
        with run_folder.locked(job):
            compute_in(job, task, run_folder.load_config(job))
    elif job is None and MULTIRUN & {*words}:
        from harness.command import sweep  # and what a run does not need

        sweep.run(task, conf, [word for word in words if word not in MULTIRUN])
    elif job is None and any(word.startswith("-") for word in words):
        show(task, conf, words)
    else:
        command = compose_command(task, words, conf)
        command.sweep_dir = None if job is None else str(job)
        start(command)


def start(command: Command) -> Path:
    """Check a command, choose its run's folder, compute the run there, and return the folder.

    Where it cannot run, no folder is left, and a run that it would have gone on with is as before.
    """
    check(command)
    if leaving.is_notebook and launchable.num_extra_processes(command.cfg.trainer):
        raise UserError(
            "From Python, a run computes in this process, and this strategy starts further ones.\n"
            f"Use strategy=dp, or type python {command.task}.py {' '.join(command.overrides)}"
        )
    meeting = Rendezvous(launcher_of(command.cfg.trainer), command.cfg.join_minutes)
    with ExitStack() as locks:
        choose = partial(choose_run.choose, command, locks)
        choice = meeting.agree(partial(fingerprint, command), choose)
        run_dir = Path(choice["run_dir"])

        try:
            meeting.check_shared(run_dir)
            if not choice["is_finished"]:
                compute_in(run_dir, command.task, choose_run.frozen(command, run_dir))
        except UserError:
            if global_rank() == 0:
                run_folder.remove_unused(run_dir, is_own=command.sweep_dir is None)
            raise
    return run_dir


def compute_in(run_dir: Path, task: str, frozen: DictConfig) -> None:
    """Compute a run whose folder is locked, and record how it ends; its ranks find the folder."""
    is_first = global_rank() == 0
    if is_first:  # the imports take seconds, and the screen should not be empty
        print_text(f"{task}: {shown(run_dir)}")
    recording = record.recording(run_dir) if is_first else nullcontext()
    with recording, parent.environment_of_ranks(run_dir):
        if is_first and not (run_dir / record.PENDING_CONFIG).exists():
            record.begin(run_dir)  # a resumed run begins as it trains
        compute(task, frozen)
    if is_first:  # of a dry run, which changes nothing
        (run_dir / record.PENDING_CONFIG).unlink(missing_ok=True)


def compute(task: str, frozen: DictConfig) -> None:
    """Train, evaluate or predict with a frozen config, as any rank of the run."""
    cfg = run_folder.resolved(frozen)
    if not is_child_rank():  # else the first process has chosen for this one
        choose_gpus(cfg)
        ranks.start(task, launchable.num_extra_processes(cfg.trainer))
    gc.disable()  # the collector would look through all that is being imported, for a second
    try:
        quick_start.import_torchmetrics()
        from harness.run import train  # torch and Lightning; seconds
    finally:
        gc.enable()  # also in a notebook, where the import has failed
    ranks.wait()
    try:
        getattr(train, task)(cfg)
    except SystemExit as error:
        if error.code or isinstance(error, AgreedExit):
            raise
        from harness.run.mistakes import read_error

        place = read_error(error).user_line
        raise UserError(
            f"{place and f'{place}: '}sys.exit() has ended the run before it was done.\n"
            "Raise an exception, or set self.trainer.should_stop = True to end the training."
        ) from error


def choose_gpus(cfg: Any) -> None:
    """Take the GPUs that the config asks for, and say which they are; a UserError without them."""
    if cfg.gpus.order == "visible":
        return
    devices = cfg.trainer.devices
    num_wanted = None if devices in (-1, "auto") else int(devices)
    for index, gpu in enumerate(choose_emptiest(num_wanted, cfg.gpus.min_free_gib or 0)):
        free = f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
        print(f"cuda:{index} is GPU {gpu.number}: {gpu.name}, {free}")


def fingerprint(command: Command) -> dict[str, Any]:
    """Describe what all processes must share: settings and versions as texts, code as a checksum.

    ``processes.meeting`` compares them, and names what differs.
    """
    cfg: Any = OmegaConf.to_container(command.cfg, resolve=True)
    may_differ = (*DIFFERS_BY_RANK, *command.rules["may_differ"])
    settings = {k: str(value) for k, value in flat(cfg).items() if not is_below(k, may_differ)}
    named = {name.replace("_", "-").lower() for name in allowed.packages_named(command.cfg)}
    compared = {*record.MAIN_PACKAGES, *named}
    versions = {name: text for name, text in record.packages().items() if name in compared}
    checksum = 0
    for place in (command.conf.parent / "src", Path(sys.argv[0]), LIBRARY):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if path.is_file():
                checksum = zlib.crc32(path.name.encode() + path.read_bytes(), checksum)
    return settings | versions | {"code (src, program, harness)": checksum}


def show(task: str, conf: Path, words: list[str]) -> None:
    """Answer ``--help``, or ``--cfg job`` with the config that the words make."""
    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    if flags & {"-h", "--help"}:
        print(help_text(task, conf))
    elif flags <= {"--cfg", "-c", "--resolve"} and flags != {"--resolve"}:
        settings = [word for word in words if word != "job" and not word.startswith("-")]
        cfg = compose(task, settings, conf)
        with bounded(), explained(task, settings, conf):
            print(OmegaConf.to_yaml(cfg, resolve="--resolve" in flags), end="")
    else:
        flag = min(flags)
        hint = nearest(flag.lstrip("-"), compose(task, [], conf), conf).replace("?", "=<value>?")
        raise UserError(
            f"{flag} is no flag here: --help, --cfg job and -m are. Settings are key=value.{hint}"
        )


def help_text(task: str, conf: Path) -> str:
    """List the choices of every group that a command takes, those first that change most."""
    names = [*FIRST, *sorted(groups(conf) - {*FIRST})] if task == "train" else EVALUATION_GROUPS
    lines = [f"python {task}.py <group>=<choice> <key>=<value> ..."]
    for name in names:  # files that begin with _ are parts of others
        files = [choice for choice in choices(conf, name) if not choice.startswith("_")]
        lines.append(f"  {name:<16} {', '.join(files)}")
    lines.append(
        f"python {task}.py --cfg job shows every key and its value; +<key>=<value> adds one."
    )
    return "\n".join(lines)


def tell_of_user(error: Exception) -> None:
    """Exit with a few lines if the user's code is to blame; another bug keeps its traceback."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return
    from harness.run import mistakes  # torch; what comes here has mostly imported it

    if message := mistakes.of_user(error):
        # What has failed speaks again when it is closed: a device, and workers that never began.
        exit_with(message, leaves_at_once="CUDA error" in message or "/dev/shm" in message)
    if isinstance(error, OSError) and error.errno in FULL:
        exit_with(
            f"{error.filename or 'A file'} was not written: {error.strerror}.\n"
            "Free space on its disk; a run goes on with resume=auto."
        )


def exit_with(message: str, leaves_at_once: bool = False) -> NoReturn:
    """Exit with a message, which names the rank where that is not the first."""
    if (rank := global_rank()) and not message.startswith("Rank "):
        message = f"Rank {rank}: {message}"
    message = printable(message, keep="\n")
    if leaves_at_once or leaving.is_srun_task():
        print(message, file=sys.stderr)
        exit_now(1)
    sys.exit(message)
