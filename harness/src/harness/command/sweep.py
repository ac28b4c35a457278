"""Run a sweep as it is typed, or go on with it: ``train.py -m <words>``.

In: words, some with several values. Out: a folder with a run for each job, and the exit status.
Every combination is a job, numbered as by Hydra's own sweeper, or Optuna chooses. Next:
``sweeps.driver``, whose jobs begin at ``command.main``. Imports no torch.
"""

import itertools
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override

from harness.command import run_folder
from harness.command.check import check
from harness.command.compose import Command, as_hydra_reads, compose_command, key_of
from harness.command.explain import explained
from harness.errors import UserError
from harness.machine import num_gpus, usable_cores
from harness.names import shown
from harness.processes.launcher import launcher
from harness.strategies.launchable import device_indices
from harness.sweeps.driver import Driver, Job, Queue

VISIBLE = "CUDA_VISIBLE_DEVICES"
MULTIRUN = ("-m", "--multirun", "hydra.mode=MULTIRUN")
MAY_CHANGE = ("sweep.num_parallel", "sweep.num_trials")  # where a sweep goes on


def run(task: str, conf: Path, typed: Sequence[str]) -> None:
    """Run a sweep to its end, or go on with one.

    Raises:
        UserError: for a mistake in the command; then nothing is left.
        SystemExit: with 1 where a job has not finished, and 128 + a signal's number.
    """
    words = [word for word in typed if word not in MULTIRUN]
    is_module = sys.modules["__main__"].__spec__ is not None
    program = ["-m", "harness", task] if is_module else [os.path.relpath(sys.argv[0])]
    typed_program = f"python {shlex.join(program)} -m"
    _check_call(task, words, typed_program)
    words = as_hydra_reads(task, words, conf)
    resume = [word.partition("=")[2] for word in words if key_of(word) == "resume"]
    words = [word for word in words if key_of(word) != "resume"]
    again = f"{typed_program} resume=auto {shlex.join(words)}"
    if resume[-1:] not in ([], ["auto"], ["null"]):
        raise UserError(f"resume={resume[-1]}: a sweep goes on by its words. Use {again}")
    overrides = _parsed(conf, words)
    words = [str(override.input_line) for override in overrides]
    # A mistake in the first job is reported now, and one in a later job when that one starts.
    command = compose_command("train", [_values(override)[0] for override in overrides], conf)
    command.is_sweep = True
    check(command)
    jobs = [o for o in overrides if o.key_or_group.partition(".")[0] != "sweep"]
    open_queue = _study(command, jobs) if "num_trials" in command.sweep else _grid(jobs)
    parent = Path(command.cfg.output_dir, "sweeps", command.cfg.name)
    folder = _same(parent, words) if resume[-1:] == ["auto"] else None
    if folder is None:
        folder = run_folder.make(parent)
        run_folder.save_words(words, folder)
    with run_folder.locked(folder):
        driver = Driver(open_queue(folder), [sys.executable, *program], _slots(command))
        status = _drive(driver, folder)
    if status:
        print(f"Go on with: {again}")
        sys.exit(status)


def _drive(driver: Driver, folder: Path) -> int:
    """Run what is left of a sweep, print a table of its runs, and return its exit status."""
    queue = driver.queue
    left = queue.num_jobs - sum(job.status == "finished" for job in queue.jobs)
    where = f"{queue.num_jobs} jobs in {shown(folder)}, {max(left, 0)} to run"
    print(f"{where}, {len(driver.free)} at a time", flush=True)
    signum = driver.run()
    if runs := [job.run for job in queue.jobs if job.folder.exists()]:
        from harness.runs import frame, tables

        tables.print_list(frame.table_of(runs))
    counts = Counter(job.status for job in queue.jobs)
    text = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    print(f"sweep folder: {shown(folder)}: {text}")
    return 128 + signum if signum else int(set(counts) != {"finished"})


def _check_call(task: str, words: Sequence[str], program: str) -> None:
    """Refuse what is no sweep of trainings, and several processes that would each run it."""
    if task != "train":
        raise UserError(f"-m is for train.py. Call {task}.py once for each checkpoint.")
    if not any(key_of(word) != "resume" for word in words):
        raise UserError(f"-m has nothing to try. Add values: {program} seed=1,2,3")
    if flags := [word for word in words if word.startswith("-")]:
        raise UserError(f"-m runs a sweep, and {flags[0]} asks for something else. Leave out one.")
    if launcher().is_one_of_several:
        keys, devices = {*map(key_of, words)}, f"trainer.devices={launcher().num_here}"
        more = [word for word in ("strategy=ddp", devices) if key_of(word) not in keys]
        raise UserError(
            f"{launcher().name} has started several processes, and each would run all jobs.\nUse "
            f"{program} {shlex.join([*words, *more])}"
        )


def _parsed(conf: Path, words: Sequence[str]) -> list[Override]:
    """Parse words as Hydra does, with the files of ``glob(*)`` in its place: others may come."""
    with (
        explained("train", [*words], conf),
        hydra.initialize_config_dir(str(conf), version_base="1.3"),
    ):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        overrides = parser.parse_overrides([*words])
        for i, override in enumerate(overrides):
            if isinstance(override.value(), Glob):
                names = ",".join(override.sweep_string_iterator())
                overrides[i] = parser.parse_override(f"{override.get_key_element()}={names}")
        return overrides


def _values(override: Override) -> list[str]:
    """List all values of a word, as words; of an interval its start."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}"]
    return [f"{key}={text}" for text in override.sweep_string_iterator()]


def _grid(overrides: Sequence[Override]) -> Callable[[Path], Queue]:
    """Make a job of each combination; one that is typed twice is one."""
    if endless := [o.input_line for o in overrides if isinstance(o.value(), IntervalSweep)]:
        raise UserError(
            f"{endless[0]} has no end of values. List some (0.001,0.01), or add sweep=optuna."
        )
    combinations = [*dict.fromkeys(itertools.product(*map(_values, overrides)))]
    return lambda at: Queue([Job(i, [*w], at / str(i)) for i, w in enumerate(combinations)])


def _study(command: Command, overrides: Sequence[Override]) -> Callable[[Path], Queue]:
    """Let Optuna choose the jobs."""
    try:
        from harness.sweeps.study import Study
    except ImportError as error:
        raise UserError("sweep=optuna needs Optuna: pip install -e .[sweep]") from error
    if command.cfg.objective is None:
        raise UserError("sweep=optuna needs objective=<a logged value>: what is to be the best.")
    study = Study(command.sweep, command.cfg.mode, overrides)
    if not study.space:
        raise UserError(
            "sweep=optuna has nothing to choose. Add values, such as "
            '"model.optimizer.lr=tag(log,interval(1e-4,1e-1))".'
        )
    return study.open


def _lasting(words: Sequence[str]) -> list[str]:
    return [word for word in words if key_of(word) not in MAY_CHANGE]


def _same(parent: Path, words: Sequence[str]) -> Path | None:
    """Find the newest sweep that was started with these words."""
    for folder in reversed(run_folder.runs_in(parent)):
        if _lasting(run_folder.load_words(folder)) == _lasting(words):
            return folder
    print(f"There is no sweep of these words in {parent} to go on with: a new one starts.")
    return None


def _slots(command: Command) -> list[dict[str, str]]:
    """Choose the variables of jobs that run at a time: GPUs of their own, or a share of cores."""
    trainer, num = command.cfg.trainer, command.sweep.get("num_parallel", "auto")
    most = None if num == "auto" else num
    slots: list[dict[str, str]] = [{}] * (most or 1)
    if trainer.accelerator not in ("cpu", "mps") and (num_here := num_gpus()):
        devices = trainer.devices
        is_all = devices in (-1, "-1", "auto") or device_indices(devices) is not None
        size = num_here if is_all else min(int(devices), num_here)
        gpus = os.environ.get(VISIBLE, ",".join(map(str, range(num_here)))).split(",")
        starts = range(0, num_here - size + 1, size)
        slots = [{VISIBLE: ",".join(gpus[start : start + size])} for start in starts][:most]
        if command.cfg.gpus.order != "visible":  # each job chooses among all GPUs
            slots = [{}] * len(slots)
    if len(slots) > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // len(slots)))}
        slots = [slot | threads for slot in slots]
    return slots
