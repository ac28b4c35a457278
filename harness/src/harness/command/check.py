"""Check a composed command before anything is written, and before torch is imported.

In: a ``Command``. Out: nothing, or a ``UserError`` with what to type instead. Next:
``choose_run``. ``default_rules.yaml`` has the allowed values of single settings.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from harness import allowed
from harness.command import config_files
from harness.command.compose import OF_THE_RUN, Command, key_of, unused
from harness.command.explain import NO_PACKAGE, explained, nearest
from harness.errors import UserError
from harness.init.settings import check_file, settings
from harness.machine import VISIBLE, candidates, num_gpus, usable_cores
from harness.names import direction, flat, leaf, shown, typed
from harness.processes.launcher import launcher
from harness.strategies import launchable
from harness.upstream.interpolations import bounded

RANGE = re.compile(r"(-?[\d.]+?)\.\.([\d.]*)")  # such as 1.. or 0.0..1.0 in the rules
# Only a conf/train.yaml of version 0.3 may turn off Hydra's logging.
HYDRAS = re.compile(r"hydra:|\s*- override /?hydra/(?!\w+_logging)")
MOST_ON_FEW, MOST_PER_CORE = 16, 8  # processes on the CPU, in all or per core
KINDS: dict[Any, type] = {"text": str, "list": list}


def check(command: Command) -> None:
    """Raise a ``UserError`` with what to type instead, if a command cannot run."""
    cfg = command.cfg
    with bounded(), explained(command.task, command.overrides, command.conf):
        for key in OmegaConf.missing_keys(cfg):
            raise UserError(f"{key} has no value. Add {key}=<value>.")
        values = flat(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    values |= flat({"sweep": command.sweep})
    folders = config_files.folders(command.conf, command.overrides)
    _refuse_settings_of_hydra(folders)
    files = _experiments(command, folders)
    _check_keys(command, files)
    _check_overrides(command, values)
    allowed.check(cfg)
    if command.task == "train":
        _check_training(command)
        _check_objective(command, files)
    _check_gpus(cfg)
    _check_devices(cfg)


def check_init(cfg: DictConfig) -> None:
    """Check the file of initial weights of a new run; a resumed run does not read it."""
    init = settings(cfg.get("init"))
    if init.path is not None and cfg.resume is None:
        check_file(init.path)


def _check_keys(command: Command, files: dict[Path, str]) -> None:
    """Refuse top-level keys that nothing reads, and values where keys are needed.

    Hydra merges both without an error. A key is read if the task's own YAML file has it, if it is a
    config group, or if an interpolation such as ``${width}`` names it.
    """
    cfg, conf, file = command.cfg, command.conf, f"{command.task}.yaml"
    own = conf if (conf / file).exists() else config_files.OWN
    schema = yaml.safe_load((own / file).read_text())
    groups = config_files.groups(conf) - {"experiment", "debug"}
    read = {*schema, *groups, *re.findall(r"\$\{([^.:}\[]+)", OmegaConf.to_yaml(cfg))}
    read |= set() if command.task == "train" else {*OF_THE_RUN}
    dicts = {name for name, default in schema.items() if isinstance(default, dict)}
    for name in (groups | dicts) & {*map(str, cfg)}:
        may_be_null = name == "data" or name not in groups
        if not (OmegaConf.is_dict(cfg[name]) or (may_be_null and cfg[name] is None)):
            raise UserError(
                f"{_place(command, files, name)}{name}: {cfg[name]} must be keys, each on a line "
                "below it: indented, and with a space after the colon."
            )
    unread = [name for name in map(str, cfg) if name not in read]
    for name in dicts - groups:
        unread += [f"{name}.{key}" for key in cfg[name] or () if key not in schema[name]]
    for key in unread:
        hint = nearest(key, cfg, conf) if key not in ("experiment", "debug") else NO_PACKAGE
        raise UserError(f"{_place(command, files, key)}nothing reads {key}.{hint}")


def _refuse_settings_of_hydra(folders: list[Any]) -> None:
    """Refuse settings in a YAML file for runs that Hydra starts."""
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.yaml")):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if HYDRAS.match(line):
                raise UserError(unused(f"{shown(path)}:{number}: {line.strip()}"))


def _experiments(command: Command, folders: list[Any]) -> dict[Path, str]:
    """Return the texts of the YAML files that ``experiment=`` and ``debug=`` choose, by path."""
    texts: dict[Path, str] = {}
    for override in command.overrides:
        group, _, value = override.lstrip("+").partition("=")
        names = re.findall(r"[^\s,\[\]'\"]+", value) if group in ("experiment", "debug") else []
        for name in names:
            paths = [Path(folder, group, f"{name}.yaml") for folder in folders]
            if path := next(filter(Path.is_file, paths), None):  # Hydra uses the first as well
                texts[path] = path.read_text()
    return texts


def _place(command: Command, files: dict[Path, str], key: str) -> str:
    """Return the override, or the line of an experiment, that sets a key."""
    for override in command.overrides:
        if key_of(override) == key:
            return f"{override}: "
    for path, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            if re.match(rf"\W*{re.escape(leaf(key))}\b", line):
                return f"{shown(path)}:{number}: "
    return ""


def _check_overrides(command: Command, values: dict[str, Any]) -> None:
    """Refuse values that the rules do not allow, and overrides that are easily misread."""
    for key, kinds in command.rules["takes"].items():
        if key in values and not any(_is_of(values[key], kind) for kind in kinds):
            *most, last = [_described(kind) for kind in kinds]
            takes = f"{', '.join(most)} or {last}" if most else last
            is_variable = any(w.startswith(f"{key}=${{oc.env:") for w in command.overrides)
            hint = "\nA variable is text: write ${oc.decode:${oc.env:NAME}}." if is_variable else ""
            raise UserError(f"{key}={typed(values[key])} must be {takes}.{hint}")
    for override in command.overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if name == "run_dir":
            raise UserError("The run sets run_dir: use output_dir=<folder> and name=<name>.")
        if override[0] == "~" and name in config_files.groups(command.conf):
            raise UserError(f"Every run needs {name}. Leave out {override}.")
        if value.lower() in ("yes", "no", "on", "off"):  # strings, which are true in Python
            raise UserError(f"{override}: write true or false; a text is \"{name}='{value}'\".")
        if name == "output" and command.task == "predict":
            output = Path(command.cfg.output)
            if output.suffix != ".csv" or output.exists():
                reason = "already exists" if output.exists() else "does not end in .csv"
                raise UserError(f"output={output} {reason}. Use another name, output=<name>.csv.")
        is_of_sweep = name.partition(".")[0] == "sweep" and command.task == "train"
        if is_of_sweep and not command.is_sweep:
            raise UserError(f"{override} is a setting of a sweep: python train.py -m {override} …")


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value matches a rule: a range, ``text``, ``list``, or an equal value."""
    if kind in KINDS:
        return isinstance(value, KINDS[kind])
    if (limits := RANGE.fullmatch(str(kind))) is None:
        return bool(value == kind) and isinstance(value, bool) == isinstance(kind, bool)
    numbers = (int, float) if "." in limits[1] else int
    is_number = isinstance(value, numbers) and not isinstance(value, bool)
    return is_number and float(limits[1]) <= value <= float(limits[2] or math.inf)


def _described(kind: Any) -> str:
    """Return a rule's allowed values as a text for a message."""
    if kind == "list":
        return "a list, such as [1,2]"
    if (limits := RANGE.fullmatch(str(kind))) is None:
        return typed(kind)
    number = "a number" if "." in limits[1] else "a whole number"
    return f"{number}, {limits[1]} {f'to {limits[2]}' if limits[2] else 'or more'}"


def _check_training(command: Command) -> None:
    cfg = command.cfg
    check_init(cfg)
    if not cfg.output_dir:
        raise UserError("output_dir must be a folder, such as outputs.")
    if ".." in Path(cfg.name).parts or Path(cfg.name).is_absolute():
        raise UserError(f"name={cfg.name} must be a folder below output_dir, without '..'.")
    if cfg.resume is not None and cfg.checkpoint is None:
        raise UserError(f"resume={cfg.resume} needs its checkpoints: leave out checkpoint=null.")
    if command.is_sweep and (
        cfg.trainer.get("num_nodes", 1) > 1 or launcher().has_several_processes
    ):
        raise UserError(
            "A sweep runs its jobs on this machine, and starts their processes by itself. Leave "
            "out trainer.num_nodes, torchrun and srun."
        )
    per_gpu = command.sweep.get("jobs_per_gpu", 1)  # a project's own sweep/grid.yaml may lack it
    if command.is_sweep and per_gpu > 1 and cfg.gpus.order != "visible":
        raise UserError(
            f"sweep.jobs_per_gpu={per_gpu} lets jobs share a GPU, but gpus={cfg.gpus.order} locks "
            "each GPU for one job. Leave out one of them."
        )


def _check_objective(command: Command, files: dict[Path, str]) -> None:
    """Infer the mode of a new objective from its name, and refuse a name without a known mode.

    With the wrong mode, the run would keep its worst checkpoint as the best.
    """
    typed_keys = {key_of(o): o.partition("=")[2] for o in command.overrides}
    sets = [*(_keys_of(text) for text in files.values()), typed_keys]
    for index, keys in enumerate(sets):
        has_mode = any("mode" in later for later in sets[index:])
        if (name := keys.get("objective")) in (None, "null") or has_mode:
            continue
        if (mode := direction(str(name))) is None:
            place = _place(command, files, "objective")
            raise UserError(f"{place}add mode, min or max, whichever is better.")
        command.cfg.mode = mode


def _keys_of(text: str) -> dict[str, Any]:
    keys = yaml.safe_load(text)
    return keys if isinstance(keys, dict) else {}


def _check_devices(cfg: DictConfig) -> None:
    """Refuse devices that do not exist, and a launch that would wait for missing processes."""
    trainer = cfg.trainer
    launchable.check_apple(trainer)
    devices, accelerator = trainer.devices, trainer.accelerator
    num_here = num_gpus() if accelerator != "cpu" else 0
    if on_cpu := num_here == 0:
        is_number = devices == "auto" or (isinstance(devices, int) and devices > 0)
        if accelerator not in ("auto", "cpu") or not is_number:
            setting = f"devices={devices}" if not is_number else f"accelerator={accelerator}"
            raise UserError(
                f"trainer.{setting} needs a GPU, and this run has none.\nUse strategy=auto (a GPU "
                "if there is one), strategy=cpu, or trainer.devices=<number of processes>."
            )
    elif devices not in ("auto", -1):
        _check_numbers(devices, num_here)
    batch_size = OmegaConf.select(cfg, "data.batch_size")
    num_processes = launchable.num_processes(trainer)
    num_cores = usable_cores()
    num_started = launchable.num_extra_processes(trainer) + 1
    if on_cpu and num_started > max(MOST_ON_FEW, MOST_PER_CORE * num_cores):
        raise UserError(
            f"trainer.devices={devices} starts {num_started} processes on {num_cores} cores, which "
            f"would take minutes to import torch.\nUse trainer.devices={max(2, num_cores)} or less."
        )
    num_workers = OmegaConf.select(cfg, "data.num_workers")
    if isinstance(num_workers, int) and num_workers > max(32, MOST_PER_CORE * num_cores):
        raise UserError(
            f"data.num_workers={num_workers} is far more than {num_cores} cores can run.\n"
            "Use data.num_workers=auto, or a number that is not larger than the cores."
        )
    if isinstance(batch_size, int) and batch_size < num_processes:
        raise UserError(
            f"data.batch_size={batch_size} cannot be split between {num_processes} processes: it "
            "counts the samples of one optimizer step over all of them.\n"
            f"Use data.batch_size={num_processes} or more."
        )
    launchable.check_launcher(trainer, launcher())


def _check_numbers(devices: Any, num_here: int) -> None:
    """Refuse GPUs that this process does not see, seconds before Lightning would."""
    wanted: list[Any] = [*devices] if OmegaConf.is_list(devices) else []
    if isinstance(devices, int):
        wanted = [*range(devices)]
    if (
        wanted
        and {*map(type, wanted)} == {int}
        and {*wanted} <= {*range(num_here)}
        and len({*wanted}) == len(wanted)
    ):
        return
    numbers = "number 0" if num_here == 1 else f"numbers 0 to {num_here - 1}"
    names = os.environ.get(VISIBLE)
    seen = f"{num_here} GPU{'s' * (num_here > 1)}{f' (of {VISIBLE}={names})' if names else ''}"
    instead = f"Use trainer.devices={num_here} or less, or trainer.accelerator=cpu."
    if OmegaConf.is_list(devices):
        instead = (
            f"Use a list of these numbers, each once, such as trainer.devices=[{num_here - 1}]."
        )
    elif launcher().num_here > 1:
        instead = f"Start {num_here} on each machine, and let each process see all of its GPUs."
    raise UserError(f"trainer.devices={devices}, but this run sees {seen}: {numbers}.\n{instead}")


def _check_gpus(cfg: DictConfig) -> None:
    """Refuse ``gpus=emptiest`` if it cannot choose, or if its choice would have no effect."""
    least, num_here = cfg.gpus.min_free_gib, launcher().num_here
    if cfg.gpus.order == "visible":
        if least is not None:
            raise UserError(f"gpus.min_free_gib={least} needs gpus=emptiest. Add gpus=emptiest.")
    elif OmegaConf.is_list(cfg.trainer.devices) or num_here > 1:
        raise UserError(
            "gpus=emptiest chooses GPUs in one process: use trainer.devices=<number>, and start it "
            "without torchrun or srun.\nOr leave it out, and name GPUs with CUDA_VISIBLE_DEVICES."
        )
    elif cfg.trainer.accelerator in ("cpu", "mps"):
        raise UserError(
            f"gpus=emptiest needs GPUs, but strategy={cfg.trainer.accelerator} uses none of them. "
            "Leave out one of the two."
        )
    else:
        candidates()
