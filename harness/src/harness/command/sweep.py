"""Start or resume a sweep: ``train.py -m <overrides>``. Imports no torch.

In: overrides, some with several values. Out: a folder with a run for each job, and the exit status.
Each combination is a job, numbered as by Hydra's own sweeper, or Optuna suggests the jobs. Next:
``sweeps``, which runs the jobs on this machine or on a cluster. They begin at ``command.main``.
"""

import itertools
import math
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from omegaconf import OmegaConf

from harness.command import run_folder
from harness.command.check import check
from harness.command.compose import Command, compose_command, key_of, parse_overrides
from harness.command.hydra_errors import explaining_errors
from harness.devices import VISIBLE, num_gpus, usable_cores
from harness.display import display_path, quoted_override
from harness.errors import UserError, print_text
from harness.keys import is_within
from harness.runs.reading import as_frame
from harness.runs.table import REPEATS, overview, show
from harness.sweeps import slurm
from harness.sweeps.driver import Place, run_jobs
from harness.sweeps.processes import Processes, Slot
from harness.sweeps.queue import Job, Queue, Study

# Keys that may differ when a sweep is resumed.
CHANGEABLE_ON_RESUME = [
    *("sweep.num_parallel", "sweep.jobs_per_gpu", "sweep.num_trials", "sweep.wait"),
    *("sweep.dry_run", "sweep.poll_seconds", "sweep.setup", "sweep.sbatch"),
]
PASSWORD = re.compile(r"(://[^:/@\s]*):[^/@\s]*@")  # in the URL of a database


def run(task: str, conf: Path, typed: Sequence[str]) -> None:
    """Run or resume a sweep; ``typed`` are the command's arguments without ``-m``.

    Raises:
        UserError: for a mistake in the command, before anything is written.
        SystemExit: with 128 + a signal's number, or 1 if a job has not finished.
    """
    is_module = sys.modules["__main__"].__spec__ is not None
    program = ["-m", "harness", task] if is_module else [os.path.relpath(sys.argv[0])]
    typed_program = f"python {shlex.join(program)} -m"
    if task != "train":
        raise UserError(f"-m is for train.py. Call {task}.py once for each checkpoint.")
    arguments = parse_overrides(task, typed, conf)
    resume = [o.partition("=")[2] for o in arguments if key_of(o) == "resume"][-1:]
    arguments = [argument for argument in arguments if key_of(argument) != "resume"]
    lasting = [o for o in arguments if key_of(o) not in ("sweep.wait", "sweep.dry_run")]
    resume_with = PASSWORD.sub(r"\1:***@", f"{typed_program} resume=auto {shlex.join(lasting)}")
    if not arguments:
        raise UserError(f"-m has nothing to try. Add values: {typed_program} seed=1,2,3")
    if resume not in ([], ["auto"], ["null"]):
        raise UserError(f"resume={resume[0]}: -m finds a sweep by its overrides. Use {resume_with}")
    with explaining_errors("train", arguments, conf):
        overrides = OverridesParser.create().parse_overrides(arguments)
    command = compose_command("train", [*map(_first_value, overrides)], conf)
    if space := _params_overrides(command, arguments):
        arguments = [*space, *arguments]
        with explaining_errors("train", arguments, conf):
            overrides = OverridesParser.create().parse_overrides(arguments)
        command = compose_command("train", [*map(_first_value, overrides)], conf)
    _check_each(command, overrides)
    jobs = [o for o in overrides if o.key_or_group.partition(".")[0] != "sweep"]
    open_queue = _queue(command, jobs)
    if command.is_on_slurm:
        slurm.check(command.sweep)
    program = [sys.executable, *program]
    parent = Path(command.cfg.output_dir, "sweeps", command.cfg.name)
    folder = _find_sweep(parent, arguments) if resume == ["auto"] else None
    if command.sweep.get("dry_run"):
        _print_submissions(command, program, jobs, folder or parent / "<date>_<time>")
        return
    if folder is None:
        folder = run_folder.make(parent)
        run_folder.save_overrides(arguments, folder)
    with run_folder.locked(folder):
        queue, wait = open_queue(folder), command.sweep.get("wait", True)
        place, reason = _choose_place(command, program, folder, queue)
        left = queue.num_jobs - sum(job.run["status"] == "finished" for job in queue.jobs)
        text = f"{queue.num_jobs} jobs in {display_path(folder)}, {max(left, 0)} to run"
        print_text(f"{text}, at most {place.num_parallel} at a time{reason}")
        signum, continuing = run_jobs(queue, place, wait)
    counts = _print_jobs(queue, continuing, folder)
    if signum or counts.keys() != {"finished"}:
        print_text(f"Resume with: {resume_with}")
        if wait or signum or counts.keys() - {"finished", "running", "waiting"}:
            sys.exit(128 + signum if signum else 1)


def _print_jobs(queue: Queue, continuing: Sequence[Job], folder: Path) -> "Counter[str]":
    """Print a table of a sweep's jobs by their numbers, and return how many have each status."""
    runs = [(job, job.run) for job in queue.jobs if job.folder.exists()]
    shown = [
        run | {"run": str(job.number)}
        for job, run in runs
        if run["status"] == "running" or job not in continuing
    ]
    if shown:
        swept = {key_of(override) for job in queue.jobs for override in job.overrides}
        show(overview(as_frame(shown), first=swept).to_dicts())
    counts = Counter(run["status"] for run in shown)
    counts += Counter(waiting=len(queue.jobs) - len(shown))  # + removes counts of 0
    text = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    print_text(f"sweep folder: {display_path(folder)}: {text}")
    return counts


def _params_overrides(command: Command, arguments: Sequence[str]) -> list[str]:
    """Return the overrides of ``sweep.params`` in a YAML file, except for keys in the command.

    Raises:
        UserError: if a key may be set only in the command.
    """
    found = []
    for key, values in (command.sweep.pop("params", None) or {}).items():
        is_key = re.fullmatch(r"(?!hydra\b)\w+([./]\w+)*", str(key))
        if key in command.rules["needs_trust"] or not is_key:
            raise UserError(f"sweep.params: {key}: this key can only be typed in the command.")
        value = ",".join(map(str, values)) if isinstance(values, list) else values
        found += [f"{key}={value}"] * (key not in map(key_of, arguments))
    return found


def _check_each(command: Command, overrides: Sequence[Override]) -> None:
    """Check the command of each value before the first job starts.

    For several numbers, only the first is checked, except below ``trainer``.
    """
    for override in overrides:
        key, text = override.key_or_group, str(override.input_line).partition("=")[2]
        if key.partition(".")[0] == "sweep" and override.is_sweep_override():
            quoted = quoted_override(override.get_key_element(), text)
            hint = f"If the value has a comma, type {quoted}"
            if key == "sweep":
                combined = shlex.quote(f"sweep=[{text}]")
                hint = f"To combine these files, type {combined}"
            raise UserError(f"{override.input_line}: a sweep has only one value of {key}.\n{hint}")
    first = [*map(_first_value, overrides)]
    command.is_sweep = True
    check(command)
    for index, override in enumerate(overrides):
        if not override.is_sweep_override() or isinstance(override.value(), IntervalSweep):
            continue
        key = override.key_or_group
        is_on_gpus = command.cfg.trainer.accelerator != "cpu" and not command.is_on_slurm
        if key == "trainer.devices" and is_on_gpus and num_gpus():
            raise UserError(
                f"{override.input_line}: all jobs of a sweep must use the same number of GPUs.\n"
                "Give trainer.devices one value, and start a sweep for each number."
            )
        for text in _values(override)[1:]:
            if key.startswith("trainer.") or not re.fullmatch(r"[-+.\de]+", text.partition("=")[2]):
                replaced = [*first[:index], text, *first[index + 1 :]]
                variant = compose_command("train", replaced, command.conf)
                variant.is_sweep = True
                check(variant)


def _values(override: Override) -> list[str]:
    """Return an override with several values as a list of overrides with one value each."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if isinstance(override.value(), (Glob, IntervalSweep)):
        raise UserError(
            f"{override.input_line} is not a list of values. Write values, such as 0.001,0.01, or "
            "add sweep=optuna for an interval."
        )
    return [f"{override.get_key_element()}={text}" for text in override.sweep_string_iterator()]


def _first_value(override: Override) -> str:
    """Return an override with only its first value, or with the start of its interval."""
    if isinstance(value := override.value(), IntervalSweep):
        return f"{override.get_key_element()}={value.start}"
    return _values(override)[0]


def _queue(command: Command, overrides: Sequence[Override]) -> Callable[[Path], Queue]:
    """Return a function that opens the queue in a folder: all combinations, or a study."""
    if "num_trials" not in command.sweep:
        combinations = [*dict.fromkeys(itertools.product(*map(_values, overrides)))]
        return lambda at: Queue([Job(i, [*w], at / str(i)) for i, w in enumerate(combinations)])
    if command.cfg.objective is None:
        raise UserError("sweep=optuna needs an objective. Add objective=<a logged metric>.")
    for override in overrides:
        if override.is_sweep_override() and override.key_or_group in REPEATS:
            key = override.key_or_group
            raise UserError(
                f"{override.input_line}: sweep=optuna would choose the luckiest {key}, because "
                f"each trial uses only one {key}.\nGive {key} one value. Then repeat the best "
                f"settings: python train.py -m {key}=1,2,3 <settings>."
            )
    if not any(override.is_sweep_override() for override in overrides):
        raise UserError(
            "sweep=optuna has nothing to choose. Add values, such as "
            '"model.optimizer.lr=tag(log,interval(1e-4,1e-1))".'
        )
    return Study(command.sweep, command.cfg.mode, overrides).open


def _find_sweep(parent: Path, arguments: Sequence[str]) -> Path | None:
    """Return the newest sweep with these overrides, ignoring those that may change."""

    def fixed(overrides: Sequence[str]) -> list[str]:
        return [o for o in overrides if not is_within(key_of(o), CHANGEABLE_ON_RESUME)]

    for folder in reversed(run_folder.runs_in(parent)):
        if fixed(run_folder.load_overrides(folder)) == fixed(arguments):
            return folder
    print_text(f"There is no sweep with these overrides in {parent} to resume: a new sweep starts.")
    return None


def _choose_place(
    command: Command, program: Sequence[str], folder: Path, queue: Queue
) -> tuple[Place, str]:
    """Return where the jobs of a sweep run, and a text about their number at a time, or ""."""
    if not command.is_on_slurm:
        slots, reason = _choose_slots(command)
        return Processes(program, slots), reason
    slurm.remove_variables()
    num = command.sweep.get("num_parallel", "auto")
    if num == "auto":  # later trials of a study learn from earlier ones
        num = max(1, queue.num_jobs // 5 if isinstance(queue, Study) else queue.num_jobs)
    return slurm.SlurmJobs(folder, program, command.sweep, num), " as Slurm jobs"


def _print_submissions(
    command: Command, program: Sequence[str], overrides: Sequence[Override], folder: Path
) -> None:
    """Print the script of the first Slurm job, and the overrides of all jobs."""
    queue = Queue([Job(0, [*map(_first_value, overrides)], folder / "0")])
    if "num_trials" not in command.sweep:
        queue = _queue(command, overrides)(folder)
    print(slurm.SlurmJobs(folder, program, command.sweep, 1).preview(queue.jobs[0]))
    for job in queue.jobs:
        print(f"job {job.number}: {shlex.join(job.overrides)}")


def _choose_slots(command: Command) -> tuple[list[Slot], str]:
    """Return the slots of a sweep, and the reason if they are fewer than requested, or ""."""
    num_parallel, per_gpu = command.sweep["num_parallel"], command.sweep.get("jobs_per_gpu", 1)
    most = None if num_parallel == "auto" else num_parallel
    sets = _sets_of_gpus(command.cfg.trainer)
    if sets:  # each set of GPUs gets one job before any gets a second
        is_chosen = command.cfg.gpus.order != "visible"  # each job chooses among all GPUs
        slots = [Slot(gpus=None if is_chosen else gpus) for gpus in sets * per_gpu][:most]
    else:
        slots = [Slot()] * (most or 1)
    if len(slots) > 1 and "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, usable_cores() // len(slots))
        slots = [Slot(slot.gpus, num_threads) for slot in slots]
    if not sets and most is None and per_gpu > 1:
        hint = f"sweep.num_parallel={per_gpu} runs {per_gpu} at a time on the CPU"
        return slots, f": no job uses a GPU, and sweep.jobs_per_gpu is for GPUs. {hint}."
    if most is None or most <= len(slots):
        return slots, ""
    num_here, size = num_gpus(), sets[0].count(",") + 1
    how = "alone" if per_gpu == 1 else f"with {per_gpu - 1} other{'s' * (per_gpu > 2)}"
    why = f", not {most}: each job uses {size} of {num_here} GPU{'s' * (num_here > 1)} {how}."
    hint = f" sweep.jobs_per_gpu={math.ceil(most / len(sets))} runs {most} at a time."
    return slots, why + hint * (command.cfg.gpus.order == "visible")


def _sets_of_gpus(trainer: Any) -> list[str]:
    """Return the GPUs of each job that can run at a time; ``[]`` if jobs use no GPU."""
    if trainer.accelerator in ("cpu", "mps") or not (num_here := num_gpus()):
        return []
    is_all = trainer.devices in (-1, "auto") or OmegaConf.is_list(trainer.devices)
    size = num_here if is_all else min(int(trainer.devices), num_here)
    gpus = os.environ.get(VISIBLE, ",".join(map(str, range(num_here)))).split(",")
    return [",".join(gpus[i : i + size]) for i in range(0, num_here - size + 1, size)]
