"""Run a sweep as it is typed, or go on with it: ``train.py -m <words>``.

In: words, some with several values. Out: a folder with a run for each job, and the exit status.
Every combination is a job, numbered as by Hydra's own sweeper, or Optuna chooses. Next:
``sweeps``, whose jobs begin at ``command.main``. Imports no torch.
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
from harness.command.compose import Command, as_hydra_reads, compose_command, key_of
from harness.command.explain import explained
from harness.errors import UserError, print_text
from harness.machine import VISIBLE, num_gpus, usable_cores
from harness.names import shown
from harness.runs.reading import as_frame
from harness.runs.table import REPEATS, overview, show
from harness.sweeps import Job, Queue, Slot, Study, drive

# Where a sweep goes on.
MAY_CHANGE = ("sweep.num_parallel", "sweep.jobs_per_gpu", "sweep.num_trials")
PASSWORD = re.compile(r"(://[^:/@\s]*):[^/@\s]*@")  # of a database's URL


def run(task: str, conf: Path, typed: Sequence[str]) -> None:
    """Run a sweep to its end, or go on with one; ``typed`` are the words without ``-m``.

    Raises:
        UserError: for a mistake in the command; then nothing is left.
        SystemExit: with 1 where a job has not finished, and 128 + a signal's number.
    """
    is_module = sys.modules["__main__"].__spec__ is not None
    program = ["-m", "harness", task] if is_module else [os.path.relpath(sys.argv[0])]
    typed_program = f"python {shlex.join(program)} -m"
    if task != "train":
        raise UserError(f"-m is for train.py. Call {task}.py once for each checkpoint.")
    words = as_hydra_reads(task, typed, conf)
    resume = [word.partition("=")[2] for word in words if key_of(word) == "resume"][-1:]
    words = [word for word in words if key_of(word) != "resume"]
    again = PASSWORD.sub(r"\1:***@", f"{typed_program} resume=auto {shlex.join(words)}")
    if not words:
        raise UserError(f"-m has nothing to try. Add values: {typed_program} seed=1,2,3")
    if resume not in ([], ["auto"], ["null"]):
        raise UserError(f"resume={resume[0]}: a sweep goes on by its words. Use {again}")
    with explained("train", words, conf):
        overrides = OverridesParser.create().parse_overrides(words)
    command = compose_command("train", [*map(_first, overrides)], conf)
    if space := _space(command, words):
        words = [*space, *words]
        with explained("train", words, conf):
            overrides = OverridesParser.create().parse_overrides(words)
        command = compose_command("train", [*map(_first, overrides)], conf)
    _check_each(command, overrides)
    jobs = [o for o in overrides if o.key_or_group.partition(".")[0] != "sweep"]
    open_queue = _queue(command, jobs)
    parent = Path(command.cfg.output_dir, "sweeps", command.cfg.name)
    folder = _same(parent, words) if resume == ["auto"] else None
    if folder is None:
        folder = run_folder.make(parent)
        run_folder.save_words(words, folder)
    with run_folder.locked(folder):
        queue, (slots, why) = open_queue(folder), _slots(command)
        left = queue.num_jobs - sum(job.run["status"] == "finished" for job in queue.jobs)
        where = f"{queue.num_jobs} jobs in {shown(folder)}, {max(left, 0)} to run"
        print_text(f"{where}, {len(slots)} at a time{why}")
        signum = drive(queue, [sys.executable, *program], slots)
    if runs := [job.run for job in queue.jobs if job.folder.exists()]:
        show(overview(as_frame(runs)).to_dicts())
    counts = Counter(run["status"] for run in runs)
    counts += Counter(waiting=len(queue.jobs) - len(runs))  # a count of 0 is left out
    text = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    print_text(f"sweep folder: {shown(folder)}: {text}")
    if signum or counts.keys() != {"finished"}:
        print_text(f"Go on with: {again}")
        sys.exit(128 + signum if signum else 1)


def _space(command: Command, words: Sequence[str]) -> list[str]:
    """Return the words that ``sweep.params`` of a YAML file stands for, but for those typed.

    Raises:
        UserError: if it names what only a user's own word may set.
    """
    found = []
    for key, values in (command.sweep.pop("params", None) or {}).items():
        is_key = re.fullmatch(r"(?!hydra\b)\w+([./]\w+)*", str(key))
        if key in command.rules["needs_trust"] or not is_key:
            raise UserError(f"sweep.params: {key}: this key can only be typed in the command.")
        value = ",".join(map(str, values)) if isinstance(values, list) else values
        found += [f"{key}={value}"] * (key not in map(key_of, words))
    return found


def _check_each(command: Command, overrides: Sequence[Override]) -> None:
    """Refuse a mistake in any value now, and not when a later job starts; numbers are of a kind."""
    first = [*map(_first, overrides)]
    command.is_sweep = True
    check(command)
    for at, override in enumerate(overrides):
        if not override.is_sweep_override() or isinstance(override.value(), IntervalSweep):
            continue
        key = override.key_or_group
        if key == "trainer.devices" and command.cfg.trainer.accelerator != "cpu" and num_gpus():
            raise UserError(
                f"{override.input_line}: each job of a sweep has GPUs of its own, as many as the "
                "others.\nGive trainer.devices one value, and start a sweep for each number."
            )
        for word in _values(override)[1:]:
            if key.startswith("trainer.") or not re.fullmatch(r"[-+.\de]+", word.partition("=")[2]):
                one = compose_command("train", [*first[:at], word, *first[at + 1 :]], command.conf)
                one.is_sweep = True
                check(one)


def _values(override: Override) -> list[str]:
    """List all values of a word, as words."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if isinstance(override.value(), (Glob, IntervalSweep)):
        raise UserError(
            f"{override.input_line} is no list of values. Write some, such as 0.001,0.01; an "
            "interval is for sweep=optuna."
        )
    return [f"{override.get_key_element()}={text}" for text in override.sweep_string_iterator()]


def _first(override: Override) -> str:
    """Return a word with the first of its values, of an interval its start."""
    if isinstance(value := override.value(), IntervalSweep):
        return f"{override.get_key_element()}={value.start}"
    return _values(override)[0]


def _queue(command: Command, overrides: Sequence[Override]) -> Callable[[Path], Queue]:
    """Make a job of each combination, of equal ones one, or let Optuna choose the jobs."""
    if "num_trials" not in command.sweep:
        combinations = [*dict.fromkeys(itertools.product(*map(_values, overrides)))]
        return lambda at: Queue([Job(i, [*w], at / str(i)) for i, w in enumerate(combinations)])
    if command.cfg.objective is None:
        raise UserError("sweep=optuna needs objective=<a logged value>: what is to be the best.")
    for override in overrides:
        if override.is_sweep_override() and override.key_or_group in REPEATS:
            raise UserError(
                f"{override.input_line}: sweep=optuna would choose the luckiest of them, and no "
                f"trial is the mean over them.\nGive {override.key_or_group} one value, and "
                "repeat the best settings afterwards: train.py -m seed=1,2,3 <settings>."
            )
    if not any(override.is_sweep_override() for override in overrides):
        raise UserError(
            "sweep=optuna has nothing to choose. Add values, such as "
            '"model.optimizer.lr=tag(log,interval(1e-4,1e-1))".'
        )
    return Study(command.sweep, command.cfg.mode, overrides).open


def _same(parent: Path, words: Sequence[str]) -> Path | None:
    """Find the newest sweep that was started with these words, but for those that may change."""

    def lasting(words: Sequence[str]) -> list[str]:
        return [word for word in words if key_of(word) not in MAY_CHANGE]

    for folder in reversed(run_folder.runs_in(parent)):
        if lasting(run_folder.load_words(folder)) == lasting(words):
            return folder
    print_text(f"There is no sweep of these words in {parent} to go on with: a new one starts.")
    return None


def _slots(command: Command) -> tuple[list[Slot], str]:
    """Choose the slots of a sweep, and say why they are fewer than were asked for."""
    num, per_gpu = command.sweep["num_parallel"], command.sweep.get("jobs_per_gpu", 1)
    most = None if num == "auto" else num
    sets = _sets_of_gpus(command.cfg.trainer)
    if sets:  # each has one job before any has two
        is_chosen = command.cfg.gpus.order != "visible"  # each job chooses among all GPUs
        slots = [Slot(gpus=None if is_chosen else gpus) for gpus in sets * per_gpu][:most]
    else:
        slots = [Slot()] * (most or 1)
    if len(slots) > 1 and "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, usable_cores() // len(slots))
        slots = [Slot(slot.gpus, num_threads) for slot in slots]
    if not sets and most is None and per_gpu > 1:
        hint = f"sweep.num_parallel={per_gpu} runs {per_gpu} at a time on the CPU"
        return slots, f": no job takes a GPU, and sweep.jobs_per_gpu is for GPUs. {hint}."
    if most is None or most <= len(slots):
        return slots, ""
    num_here, size = num_gpus(), sets[0].count(",") + 1
    how = "for itself" if per_gpu == 1 else f"with {per_gpu - 1} other{'s' * (per_gpu > 2)}"
    why = f", not {most}: of {num_here} GPU{'s' * (num_here > 1)} each job takes {size} {how}."
    hint = f" sweep.jobs_per_gpu={math.ceil(most / len(sets))} runs {most} at a time."
    return slots, why + hint * (command.cfg.gpus.order == "visible")


def _sets_of_gpus(trainer: Any) -> list[str]:
    """List the GPUs of one job, of the next, and so on; nothing where jobs take none."""
    if trainer.accelerator in ("cpu", "mps") or not (num_here := num_gpus()):
        return []
    is_all = trainer.devices in (-1, "auto") or OmegaConf.is_list(trainer.devices)
    size = num_here if is_all else min(int(trainer.devices), num_here)
    gpus = os.environ.get(VISIBLE, ",".join(map(str, range(num_here)))).split(",")
    return [",".join(gpus[i : i + size]) for i in range(0, num_here - size + 1, size)]
