"""Run a sweep as it is typed, or go on with it: ``train.py -m <words>``.

In: words, of which some name several values. Out: a folder with a run for each job, and the exit
status. Hydra's parser reads the words, and every combination is a job, numbered as by Hydra's own
sweeper. Next: ``sweeps.driver``, which runs the jobs; each begins at ``command.main``. No torch.
"""

import itertools
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from omegaconf import OmegaConf

from harness import frozen_files
from harness.command import run_folder, validate, which_run
from harness.command.compose import Command, as_hydra_reads, compose_command
from harness.command.explain import explained
from harness.errors import UserError
from harness.machine import num_gpus
from harness.places import shown
from harness.processes.launcher import launcher
from harness.strategies.launchable import device_indices
from harness.sweeps.driver import Driver, Job, Needs, Queue

MULTIRUN = ("-m", "--multirun", "hydra.mode=MULTIRUN")
JOBS = "jobs.yaml"  # the words of a grid's jobs: a glob may match other files later
MOST_TRIED = 20  # jobs, until one can be composed
# Words that may change where a sweep goes on: where it is, and how it is run.
MAY_CHANGE = ("resume", "output_dir", "name", "sweep.num_parallel", "sweep.num_trials")


def run(task: str, conf: Path, typed: Sequence[str]) -> None:
    """Run a sweep to its end, or go on with one.

    Raises:
        UserError: for a mistake in the command; then nothing is left.
        SystemExit: with 1 where a job has not finished, and 128 + a signal's number.
    """
    words = [word for word in typed if word not in MULTIRUN]
    if task != "train":
        raise UserError(
            f"-m is for trainings: python train.py -m <words>. Call {task}.py once for each "
            "checkpoint."
        )
    if flags := [word for word in words if word.startswith("-")]:
        raise UserError(f"-m runs a sweep, and {flags[0]} asks for something else. Leave out one.")
    script = os.path.abspath(sys.argv[0])
    is_module = sys.modules["__main__"].__spec__ is not None
    program = ["-m", "harness", task] if is_module else [script]
    shown_program = f"python {shlex.join(program if is_module else [os.path.relpath(script)])} -m"
    started_by = launcher()
    if started_by.is_one_of_several:
        keys, devices = {*map(_key, words)}, f"trainer.devices={started_by.num_here}"
        words += [word for word in ("strategy=ddp", devices) if _key(word) not in keys]
        raise UserError(
            f"{started_by.name} has started {started_by.num_processes} processes, and each would "
            "run the whole sweep: a sweep starts the processes of its jobs itself.\n"
            f"Use {shown_program} {shlex.join(words)}"
        )
    words = as_hydra_reads(task, words, conf)
    resume = [word for word in words if _key(word) == "resume"]
    wanted = resume[-1].partition("=")[2].strip("'\"") if resume else "null"
    words = [word for word in words if word not in resume]
    named = None if wanted in ("null", "auto") else Path(wanted).resolve()
    if named:
        words = _words_of(named, words)
    overrides = _parsed(conf, words)
    command = _first_valid(conf, overrides)
    jobs = _checked(command, overrides)
    parent = Path(command.cfg.output_dir, "sweeps", _name(command))
    with which_run.choosing(parent):
        folder = named or (_same(parent, words) if wanted == "auto" else None)
        folder = folder or _made(parent, words, jobs)
    with which_run.locked(folder):
        status = _drive(folder, command, overrides, [sys.executable, *program])
    if status:
        print(f"Go on with: {shown_program} resume={shlex.quote(shown(folder))}")
        sys.exit(status)


def _drive(
    folder: Path, command: Command, overrides: Sequence[Override], program: Sequence[str]
) -> int:
    """Run what is left of a sweep, and return its exit status."""
    if "num_trials" in command.sweep:
        from harness.sweeps.study import Study, open_study, sampler_of

        sampler = sampler_of(command.sweep["sampler"])
        study = open_study(folder, _name(command), command.cfg.mode, sampler)
        queue: Queue = Study(study, folder, _of_jobs(overrides), command.sweep["num_trials"])
    else:
        words_of_jobs = run_folder.as_typed(frozen_files.read_yaml(folder / JOBS))
        queue = Queue([Job(i, [*words], folder / str(i)) for i, words in enumerate(words_of_jobs)])
    num_parallel = command.sweep.get("num_parallel", "auto")
    num_parallel = None if num_parallel == "auto" else num_parallel
    varied = [override.key_or_group for override in overrides if override.is_sweep_override()]
    driver = Driver(queue, program, num_parallel, lambda job: _needs(command.conf, job), varied)
    left = max(queue.num_jobs - sum(job.status == "finished" for job in queue.jobs), 0)
    where = f"{queue.num_jobs} jobs in {shown(folder)}, {left} to run"
    print(f"{where}, {driver.num_slots} at a time", flush=True)
    signum = driver.run()
    if runs := [job.run for job in queue.jobs if job.folder.exists()]:
        from harness.runs import frame, tables

        tables.print_list(frame.table_of(runs))
    counts = Counter(job.status for job in queue.jobs)
    text = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    print(f"sweep folder: {shown(folder)}: {text}")
    return 128 + signum if signum else int(set(counts) != {"finished"})


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _parsed(conf: Path, words: Sequence[str]) -> list[Override]:
    """Parse words as Hydra does; ``glob(*)`` looks for the files of a group."""
    with explained("train", [*words], conf):
        with hydra.initialize_config_dir(str(conf), version_base="1.3"):
            parser = OverridesParser.create(GlobalHydra.instance().config_loader())
            overrides = parser.parse_overrides([*words])
            for override in overrides:  # while the files are within reach
                if override.is_discrete_sweep():
                    _values(override)
        return overrides


def _values(override: Override) -> list[str]:
    """List all values of a word, as words; of an interval its start."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}"]
    texts = [*override.sweep_string_iterator()]
    if isinstance(value, Glob):  # files that begin with _ are parts of others
        texts = [text for text in texts if not text.startswith("_")]
    return [f"{key}={text}" for text in texts]


def _first_valid(conf: Path, overrides: Sequence[Override]) -> Command:
    """Compose the first job that can be: a mistake of another one is that job's own."""
    errors = [UserError("A word of the sweep has no values.")]
    for words in itertools.islice(itertools.product(*map(_values, overrides)), MOST_TRIED):
        try:
            command = compose_command("train", words, conf)
            command.is_sweep = True
            validate.check(command)
            return command
        except UserError as error:
            errors.append(error)
    raise errors[:2][-1]


def _checked(command: Command, overrides: Sequence[Override]) -> list[list[str]] | None:
    """Check the settings of a sweep, and return the words of a grid's jobs; none of a study's.

    A job that is asked for twice is one.
    """
    for name in ("num_parallel", "num_trials"):
        value = command.sweep.get(name, 1)
        if (name, value) != ("num_parallel", "auto") and (type(value) is not int or value < 1):
            auto = ", or auto" if name == "num_parallel" else ""
            raise UserError(f"sweep.{name}={value} must be a whole number, 1 or more{auto}.")
    if "num_trials" in command.sweep:
        from harness.sweeps import study

        if command.cfg.objective is None:
            raise UserError("sweep=optuna needs an objective: what is to be the best.")
        if not study.space_of(overrides):
            raise UserError(
                "sweep=optuna has nothing to choose: every job would be the same.\n"
                'Add values, such as "model.optimizer.lr=tag(log,interval(1e-4,1e-1))".'
            )
        study.sampler_of(command.sweep["sampler"])
        return None
    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise UserError(
                f"{override.input_line} has no end of values.\n"
                "Name some (0.001,0.01), or let Optuna choose: sweep=optuna."
            )
    values = map(_values, _of_jobs(overrides))
    return [list(words) for words in dict.fromkeys(itertools.product(*values))]


def _of_jobs(overrides: Sequence[Override]) -> list[Override]:
    return [o for o in overrides if o.key_or_group.partition(".")[0] != "sweep"]


def _name(command: Command) -> str:
    return str(command.cfg.name or command.choices.get("experiment") or "default")


def _needs(conf: Path, words: list[str]) -> Needs:
    """Say how many GPUs a job computes on; the driver chooses them."""
    there = num_gpus()
    if not there or sys.platform == "darwin":
        return Needs(words)
    try:
        command = compose_command("train", words, conf)
        validate.check(command)
    except UserError:
        return Needs(words)  # its own process says why it cannot run
    cfg = command.cfg
    if cfg.trainer.accelerator in ("cpu", "mps"):
        return Needs(words)
    devices = cfg.trainer.devices
    is_all = devices in (-1, "-1", "auto") or device_indices(devices) is not None
    if "gpus" in cfg and cfg.gpus.order != "visible":
        words = [*words, "gpus=visible", "gpus.min_free_gib=null"]
    least = (cfg.get("gpus") or {}).get("min_free_gib") or 0.0
    return Needs(words, there if is_all else int(devices), float(least))


def _made(parent: Path, words: Sequence[str], jobs: Sequence[Sequence[str]] | None) -> Path:
    """Make a sweep's folder; it is one once its words are written, the last of all."""
    folder = which_run.make(parent)
    if jobs is not None:
        text = OmegaConf.to_yaml(OmegaConf.create([list(job) for job in jobs]))
        frozen_files.write_yaml(folder / JOBS, text)
    run_folder.save_words([*words], folder)
    return folder


def _lasting(words: Sequence[str]) -> list[str]:
    """Choose the words that a sweep is made of."""
    return [word for word in words if _key(word) not in MAY_CHANGE]


def _same(parent: Path, words: Sequence[str]) -> Path | None:
    """Find the newest sweep that was started with these words."""
    for folder in reversed(run_folder.runs_in(parent)):
        if _lasting(run_folder.load_words(folder)) == _lasting(words):
            return folder
    print(f"There is no sweep of these words in {parent} to go on with: a new one starts.")
    return None


def _words_of(folder: Path, words: list[str]) -> list[str]:
    """Return the words of a sweep that is named by its folder, with those that may change."""
    if not (folder / "overrides.yaml").is_file() or (folder / "config.yaml").exists():
        raise UserError(
            f"resume={folder}: there is no sweep.\n"
            "Use resume=auto, or the folder of a sweep, <output_dir>/sweeps/<name>/<date>_<time>."
        )
    first, keys = run_folder.load_words(folder), {_key(word) for word in words}
    if _lasting(words) not in ([], _lasting(first)):
        raise UserError(
            f"resume={folder} goes on with {shlex.join(_lasting(first))}, and not with "
            f"{shlex.join(_lasting(words))}.\nLeave these out, or leave out resume= to start "
            "another sweep."
        )
    return [*(word for word in first if _key(word) not in keys), *words]
