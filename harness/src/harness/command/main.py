"""The entry point of a command: run it, and turn errors into readable messages.

In: the arguments of ``train.py``. Out: a run's folder and the exit status. The path of a run:
``compose`` and ``check`` the config, ``Rendezvous`` of all processes, ``choose_run``, and
``training.train``, which imports torch. A rank that rank 0 has started begins at ``run_task``. An
earlier step imports torch only for a rendezvous of several processes, for the newest checkpoint of
a run to resume, and to count GPUs that NVML does not show. So ``--help``, ``--cfg job`` and most
errors appear at once.
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

from harness import provenance, targets
from harness.command import choose_run, run_folder
from harness.command.check import check
from harness.command.compose import (
    EVALUATION_GROUPS,
    Command,
    compose,
    compose_command,
)
from harness.command.config_files import choices, groups
from harness.command.hydra_errors import CHECKPOINT, explaining_errors, suggest_key
from harness.compat import quick_start
from harness.compat.interpolations import bounded
from harness.devices import choose_emptiest, gib
from harness.display import display_path
from harness.distributed import parent_process, shutdown, start_ranks
from harness.distributed.launcher import global_rank, is_child_rank, launcher_of
from harness.distributed.rendezvous import Rendezvous
from harness.distributed.shutdown import exit_now
from harness.errors import (
    AgreedExit,
    TrainingError,
    UserError,
    outlive_readers,
    print_text,
    printable,
)
from harness.failed_imports import describe_failed_import
from harness.files import DISK_FULL, LIBRARY
from harness.keys import flatten, is_within
from harness.strategies import launch_checks

MULTIRUN = {"-m", "--multirun", "hydra.mode=MULTIRUN"}
FIRST = ["experiment", "model", "data", "trainer", "strategy"]  # the first groups in --help
# Keys that may differ between ranks.
DIFFERS_BY_RANK = ("output_dir", "run_dir", "resume", "checkpoint", "output")


def main(task: str, conf: str | Path, arguments: Sequence[str] | None = None) -> None:
    """Run ``train``, ``evaluate`` or ``predict`` with ``arguments``, or with the command line's.

    Raises:
        SystemExit: with a message, for a mistake of the user.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        outlive_readers()
    parent_process.follow_parent()  # again, for a process that was forked after the imports
    shutdown.exit_on_signals()
    job = parent_process.folder_of_job()
    try:
        targets.load_rules(conf)
        dispatch(task, Path(conf).resolve(), list(arguments), job)
    except AgreedExit as agreed:
        shutdown.let_rank_0_exit_first()
        exit_now(agreed.code)  # all files are written; a normal exit may take seconds
    except TrainingError:  # the code that raised it has logged it
        shutdown.wait_for_first_failure(is_mistake=True)
        exit_now(1)
    except UserError as error:
        shutdown.wait_for_first_failure(is_mistake=True)
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if job is not None and global_rank() == 0:
            provenance.note(job, status="failed", reason=str(error).partition("\n")[0])
        exit_with(str(error))
    except Exception as error:
        shutdown.wait_for_first_failure(is_mistake=False)
        exit_if_user_error(error)
        if shutdown.is_srun_task():
            traceback.print_exc()
            exit_now(1)
        raise


def dispatch(task: str, conf: Path, arguments: list[str], job: Path | None) -> None:
    """Decide from the arguments and the environment what this process does, and do it.

    The process is a rank of a run, a job of a sweep, a sweep, or a new command, or it only answers
    a flag such as ``--help``. ``job`` is the folder of a sweep's job. If there are no arguments,
    this folder has the config.
    """
    if run_dir := parent_process.folder_of_run():
        run_task(task, run_folder.load_current_config(run_dir))
        shutdown.set_parent_signal(0)  # the run is complete, and rank 0 may end first
    elif job is not None and not arguments:
        with run_folder.locked(job):
            run_in_folder(job, task, run_folder.load_config(job))
    elif job is None and MULTIRUN & {*arguments}:
        from harness.command import sweep  # imports modules that a run does not need

        sweep.run(task, conf, [argument for argument in arguments if argument not in MULTIRUN])
    elif job is None and any(argument.startswith("-") for argument in arguments):
        show(task, conf, arguments)
    else:
        command = compose_command(task, arguments, conf)
        command.sweep_dir = None if job is None else str(job)
        start_command(command)


def start_command(command: Command) -> Path:
    """Check a command, choose its run's folder, compute the run there, and return the folder.

    After a ``UserError``, a new folder is removed, and a run to resume is unchanged.
    """
    check(command)
    if shutdown.is_notebook and launch_checks.num_extra_processes(command.cfg.trainer):
        raise UserError(
            "From Python, a run uses only this process, but this strategy starts more of them.\n"
            f"Use strategy=dp, or type python {command.task}.py {' '.join(command.overrides)}"
        )
    rendezvous = Rendezvous(launcher_of(command.cfg.trainer), command.cfg.join_minutes)
    with ExitStack() as locks:
        choose = partial(choose_run.choose, command, locks)
        choice = rendezvous.agree(partial(fingerprint, command), choose)
        run_dir = Path(choice["run_dir"])

        try:
            rendezvous.check_shared(run_dir)
            if not choice["is_finished"]:
                run_in_folder(run_dir, command.task, choose_run.frozen(command, run_dir))
        except UserError:
            if global_rank() == 0:
                run_folder.remove_unused(run_dir, is_own=command.sweep_dir is None)
            raise
    return run_dir


def run_in_folder(run_dir: Path, task: str, frozen: DictConfig) -> None:
    """Compute a run in its locked folder, record how it ends, and pass the folder to its ranks."""
    is_rank_0 = global_rank() == 0
    if is_rank_0:  # print before the imports, which take seconds
        print_text(f"{task}: {display_path(run_dir)}")
    recording = provenance.recording(run_dir) if is_rank_0 else nullcontext()
    with recording, parent_process.environment_of_ranks(run_dir):
        if is_rank_0 and not (run_dir / provenance.PENDING_CONFIG).exists():
            provenance.begin(run_dir)  # a resumed run calls this when its training starts
        run_task(task, frozen)
    if is_rank_0:  # a dry run leaves this file, because it must not change the run
        (run_dir / provenance.PENDING_CONFIG).unlink(missing_ok=True)


def run_task(task: str, frozen: DictConfig) -> None:
    """Train, evaluate or predict with a frozen config, as any rank of the run."""
    cfg = run_folder.resolved(frozen)
    if not is_child_rank():  # a child rank uses the choice of rank 0
        choose_gpus(cfg)
        start_ranks.start_ranks(task, launch_checks.num_extra_processes(cfg.trainer))
    gc.disable()  # garbage collection would add a second to the imports
    try:
        quick_start.import_torchmetrics()
        from harness.training import train  # imports torch and Lightning, which takes seconds
    except ImportError as error:
        from harness.compat import versions

        versions.refuse(error)
    finally:
        gc.enable()  # a notebook continues after a failed import
    start_ranks.wait()
    try:
        getattr(train, task)(cfg)
    except SystemExit as error:
        if error.code or isinstance(error, AgreedExit):
            raise
        from harness.training.user_errors import read_error

        line = read_error(error).user_line
        raise UserError(
            f"{line and f'{line}: '}sys.exit() ended the run before the run was complete.\nRaise "
            "an exception, or set self.trainer.should_stop = True to end the training."
        ) from error


def choose_gpus(cfg: Any) -> None:
    """Choose GPUs for ``gpus=emptiest`` and print them; a UserError if there are too few."""
    if cfg.gpus.order == "visible":
        return
    devices = cfg.trainer.devices
    num_wanted = None if devices in (-1, "auto") else int(devices)
    for index, gpu in enumerate(choose_emptiest(num_wanted, cfg.gpus.min_free_gib or 0)):
        free = f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
        print(f"cuda:{index} is GPU {gpu.number}: {gpu.name}, {free}")


def fingerprint(command: Command) -> dict[str, Any]:
    """Return the settings, versions (strings) and code checksum that all processes must share.

    ``distributed.rendezvous`` compares them, and raises an error with the first difference.
    """
    cfg: Any = OmegaConf.to_container(command.cfg, resolve=True)
    may_differ = (*DIFFERS_BY_RANK, *command.rules["may_differ"])
    settings = {k: str(value) for k, value in flatten(cfg).items() if not is_within(k, may_differ)}
    named = {name.replace("_", "-").lower() for name in targets.packages_named(command.cfg)}
    compared = {*provenance.MAIN_PACKAGES, *named}
    versions = {name: text for name, text in provenance.packages().items() if name in compared}
    checksum = 0
    for root in (command.conf.parent / "src", Path(sys.argv[0]), LIBRARY):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            if path.is_file():
                checksum = zlib.crc32(path.name.encode() + path.read_bytes(), checksum)
    return settings | versions | {"code (src, program, harness)": checksum}


def show(task: str, conf: Path, arguments: list[str]) -> None:
    """Print the text of ``--help``, or the config of ``--cfg job`` and the overrides."""
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
    if flags & {"-h", "--help"}:
        print(help_text(task, conf))
    elif flags <= {"--cfg", "-c", "--resolve"} and flags != {"--resolve"}:
        overrides = [o for o in arguments if o != "job" and not o.startswith("-")]
        cfg = compose(task, overrides, conf)
        with bounded(), explaining_errors(task, overrides, conf):
            print(OmegaConf.to_yaml(cfg, resolve="--resolve" in flags), end="")
    else:
        flag = min(flags)
        typed = [o for o in arguments if "=" in o and not o.startswith("-")]
        name, cfg = flag.lstrip("-"), compose(task, typed, conf)
        if name in flatten(OmegaConf.to_container(cfg)):  # type: ignore[arg-type]
            hint = f" Write {name}=<value>"
        elif name == "checkpoint":
            hint = f" {CHECKPOINT}"
        else:
            hint = suggest_key(name, cfg, conf).replace("?", "=<value>?")
        raise UserError(
            f"{flag} is not a flag of {task}.py. Its flags are --help, --cfg job and -m; settings "
            f"are key=value.{hint}"
        )


def help_text(task: str, conf: Path) -> str:
    """Return the text of ``--help``: the config groups of a command and their choices."""
    names = [*FIRST, *sorted(groups(conf) - {*FIRST})] if task == "train" else EVALUATION_GROUPS
    lines = [f"python {task}.py <group>=<choice> <key>=<value> ..."]
    for name in names:  # files that begin with _ are not choices
        files = [choice for choice in choices(conf, name) if not choice.startswith("_")]
        lines.append(f"  {name:<16} {', '.join(files)}")
    lines.append(
        f"python {task}.py --cfg job shows every key and its value; +<key>=<value> adds one."
    )
    return "\n".join(lines)


def exit_if_user_error(error: Exception) -> None:
    """Exit with a short message if the user's code caused the error, or the disk is full.

    Otherwise return, so that the error keeps its traceback.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return
    if failed := describe_failed_import(error):
        exit_with(failed)
    # Imports torch, which most commands have imported before an error gets here.
    from harness.training import user_errors

    if message := user_errors.describe_user_error(error):
        # A failed device, or workers that did not start, would print more errors at exit.
        exit_with(message, is_immediate="CUDA error" in message or "/dev/shm" in message)
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        exit_with(
            f"{error.filename or 'A file'} was not written: {error.strerror}.\nFree space on its "
            "disk, and type the command again. To continue a training, add resume=auto."
        )


def exit_with(message: str, is_immediate: bool = False) -> NoReturn:
    """Exit with status 1 and a message, which begins with the rank on non-zero ranks."""
    if (rank := global_rank()) and not message.startswith("Rank "):
        message = f"Rank {rank}: {message}"
    message = printable(message, keep="\n")
    if is_immediate or shutdown.is_srun_task():
        print(message, file=sys.stderr)
        exit_now(1)
    sys.exit(message)
