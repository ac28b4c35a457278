"""Check a composed command before anything is written, and before torch is imported.

In: a ``Command``. Out: nothing, or a ``UserError`` with what to type instead. Next:
``choose_run``. ``default_rules.yaml`` has the allowed values of single settings.
"""

import math
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from harness import targets
from harness.command import config_files
from harness.command.check_devices import check_devices, check_gpus
from harness.command.compose import RUN_KEYS, Command, key_of, unused_setting
from harness.command.hydra_errors import (
    CHECKPOINT,
    NO_PACKAGE,
    check_required_keys,
    explaining_errors,
    suggest_key,
)
from harness.compat.interpolations import bounded
from harness.display import display_path, format_override
from harness.distributed.launcher import launcher
from harness.errors import UserError
from harness.init.settings import check_file, read_init
from harness.keys import flatten, last_part
from harness.objective import mode_of

RANGE = re.compile(r"(-?[\d.]+?)\.\.([\d.]*)")  # such as 1.. or 0.0..1.0 in the rules
# Only a conf/train.yaml of version 0.3 may turn off Hydra's logging.
HYDRA_SETTING = re.compile(r"hydra:|\s*- override /?hydra/(?!\w+_logging)")
KINDS: dict[Any, type] = {"text": str, "list": list}
# The place of TensorBoard's events, which the summary and a resumed run expect.
EVENTS = {"save_dir": "${run_dir}", "name": "", "version": "tensorboard"}


def check(command: Command) -> None:
    """Raise a ``UserError`` with what to type instead, if a command cannot run."""
    cfg = command.cfg
    for override in command.overrides:
        if override[0] == "~" and (name := key_of(override)) in config_files.groups(command.conf):
            needs = "The command has no" if name in ("experiment", "debug") else "Every run needs a"
            raise UserError(f"{needs} choice of {name}. Leave out {override}.")
    check_required_keys(command.task, cfg, command.conf)
    with bounded(), explaining_errors(command.task, command.overrides, command.conf):
        for key in OmegaConf.missing_keys(cfg):
            raise UserError(f"{key} has no value. Add {key}=<value>.")
        values = flatten(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    values |= flatten({"sweep": command.sweep})
    folders = config_files.folders(command.conf, command.overrides)
    _refuse_settings_of_hydra(folders)
    files = _experiments(command, folders)
    _check_keys(command, files)
    _check_overrides(command, values)
    targets.check(cfg)
    _check_entries(command)
    if command.task == "train":
        _check_training(command)
        _check_objective(command, files)
    if command.is_on_slurm:
        return  # each job checks the devices of its own machine
    check_gpus(cfg)
    check_devices(cfg)


def check_init(cfg: DictConfig) -> None:
    """Check the file of initial weights of a new run; a resumed run does not read it."""
    init = read_init(cfg.get("init"))
    if init.path is not None and cfg.resume is None:
        check_file(init.path)


def _check_keys(command: Command, files: dict[Path, str]) -> None:
    """Refuse top-level keys that nothing reads, and values where keys are needed.

    Hydra merges both without an error. A key is read if the task's own YAML file has it, if it is a
    config group, or if an interpolation such as ``${width}`` names it.
    """
    cfg, conf, file = command.cfg, command.conf, f"{command.task}.yaml"
    own = conf if (conf / file).exists() else config_files.LIBRARY_CONF
    schema = yaml.safe_load((own / file).read_text())
    groups = config_files.groups(conf) - {"experiment", "debug"}
    read = {*schema, *groups, *re.findall(r"\$\{([^.:}\[]+)", OmegaConf.to_yaml(cfg))}
    read |= set() if command.task == "train" else {*RUN_KEYS}
    dicts = {name for name, default in schema.items() if isinstance(default, dict)}
    for name in (groups | dicts) & {*map(str, cfg)}:
        may_be_null = name == "data" or name not in groups
        if not (OmegaConf.is_dict(cfg[name]) or (may_be_null and cfg[name] is None)):
            origin = _origin(command, files, name)
            if origin.startswith(f"{name}="):  # an override of the command
                hint = f"\n{CHECKPOINT}" if name == "checkpoint" else ""
                raise UserError(
                    f"{origin}{name} is a group of keys. Set one of its keys: "
                    f"{name}.<key>=<value>.{hint}"
                )
            raise UserError(
                f"{origin}{name} has the value {cfg[name]}, but needs keys below it. Write each "
                "key on a line of its own, indented, with a space after its colon."
            )
    unread = [name for name in map(str, cfg) if name not in read]
    for name in dicts - groups:
        unread += [f"{name}.{key}" for key in cfg[name] or () if key not in schema[name]]
    for key in unread:
        hint = suggest_key(key, cfg, conf)
        if key in ("experiment", "debug", "global"):
            hint = NO_PACKAGE
        elif "." in key and key in list(cfg):
            first, rest = key.split(".", 1)
            hint = f" A YAML file nests keys: write {first}: {{{rest}: <value>}}"
        raise UserError(f"{_origin(command, files, key)}nothing reads {key}.{hint}")


def _check_entries(command: Command) -> None:
    """Refuse nodes without a ``_target_``, from which Hydra would build a dict and no object."""
    entries = {key: command.cfg.get(key) for key in ("model", "data") if command.task == "train"}
    for group in ("callbacks", "logger"):
        nodes = command.cfg.get(group) or {}
        entries |= {f"{group}.{name}": node for name, node in nodes.items()}
    for key, node in entries.items():
        if node and not (OmegaConf.is_dict(node) and "_target_" in node):
            raise UserError(
                f"{key} has no _target_, the class to build. Add "
                f"+{key}._target_=<package>.<module>.<class>, or leave out {key}."
            )
        if node and node.get("_partial_"):
            raise UserError(f"{key}._partial_=true does not build {key}. Leave out _partial_.")
        is_ours = node and node["_target_"] == "harness.loggers.tensorboard.TensorBoard"
        for name, value in EVENTS.items() if is_ours else ():
            found = OmegaConf.to_container(node).get(name, value) or ""  # type: ignore[union-attr]
            if found != value:
                raise UserError(
                    f"{key}.{name}={found} moves the events out of <run>/tensorboard, where a "
                    f"resumed run looks for them.\nRemove {key}.{name}. The folders of runs are "
                    "named by name=<name>, and output_dir=<folder> holds them."
                )


def _refuse_settings_of_hydra(folders: list[Any]) -> None:
    """Refuse settings in YAML files that affect only runs that Hydra itself starts."""
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.yaml")):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if HYDRA_SETTING.match(line):
                raise UserError(unused_setting(f"{display_path(path)}:{number}: {line.strip()}"))


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


def _origin(command: Command, files: dict[Path, str], key: str) -> str:
    """Return the override, or the line of an experiment, that sets a key."""
    for override in command.overrides:
        if key_of(override) == key:
            return f"{override}: "
    for path, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            if re.match(rf"\W*{re.escape(last_part(key))}\b", line):
                return f"{display_path(path)}:{number}: "
    return ""


def _check_overrides(command: Command, values: dict[str, Any]) -> None:
    """Refuse values that the rules do not allow, and overrides that have a surprising effect."""
    for key, kinds in command.rules["takes"].items():
        if key in values and not any(_matches_rule(values[key], kind) for kind in kinds):
            *most, last = [_describe_rule(kind) for kind in kinds]
            allowed = f"{', '.join(most)} or {last}" if most else last
            is_variable = any(o.startswith(f"{key}=${{oc.env:") for o in command.overrides)
            hint = "\nA variable is text: write ${oc.decode:${oc.env:NAME}}." if is_variable else ""
            is_numeric = any(RANGE.fullmatch(str(kind)) for kind in kinds)
            if "text" in kinds and type(values[key]) is int and not is_numeric:
                hint = f"\nWrite the number as text: '{key}=\"{values[key]}\"'"
            raise UserError(f"{key}={format_override(values[key])} must be {allowed}.{hint}")
    for override in command.overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if name == "run_dir":
            raise UserError("The run sets run_dir: use output_dir=<folder> and name=<name>.")
        if value.lower() in ("yes", "no", "on", "off"):  # strings, which are true in Python
            raise UserError(
                f"{override}: write true or false. For a text, write \"{name}='{value}'\"."
            )
        if name == "output" and command.task == "predict":
            output = Path(command.cfg.output)
            if output.suffix != ".csv" or output.exists():
                reason = "already exists" if output.exists() else "does not end in .csv"
                raise UserError(f"output={output} {reason}. Use another name, output=<name>.csv.")
        is_of_sweep = name.partition(".")[0] == "sweep" and command.task == "train"
        if is_of_sweep and not command.is_sweep:
            raise UserError(
                f"{override} is a setting of sweeps. Add -m: python train.py -m {override} …"
            )


def _matches_rule(value: Any, kind: Any) -> bool:
    """Return whether a value matches a rule: a range, ``text``, ``list``, or an equal value."""
    if kind in KINDS:
        return isinstance(value, KINDS[kind])
    if (limits := RANGE.fullmatch(str(kind))) is None:
        return bool(value == kind) and isinstance(value, bool) == isinstance(kind, bool)
    numbers = (int, float) if "." in limits[1] else int
    is_number = isinstance(value, numbers) and not isinstance(value, bool)
    return is_number and float(limits[1]) <= value <= float(limits[2] or math.inf)


def _describe_rule(kind: Any) -> str:
    """Return a rule's allowed values as a text for a message."""
    if kind == "list":
        return "a list, such as [1,2]"
    if (limits := RANGE.fullmatch(str(kind))) is None:
        return format_override(kind)
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
    if not command.is_sweep:
        return
    if cfg.trainer.get("num_nodes", 1) > 1 or launcher().has_several_processes:
        where = "by srun: use sweep.sbatch.nodes" if command.is_on_slurm else "on this machine"
        raise UserError(
            f"A sweep starts the processes of its jobs by itself, {where}. Leave out "
            "trainer.num_nodes, torchrun and srun."
        )
    per_gpu = command.sweep.get("jobs_per_gpu", 1)  # a project's own sweep/grid.yaml may lack it
    if per_gpu > 1 and (command.is_on_slurm or cfg.gpus.order != "visible"):
        other = "sweep=slurm" if command.is_on_slurm else f"gpus={cfg.gpus.order}"
        raise UserError(
            f"sweep.jobs_per_gpu={per_gpu} lets jobs share a GPU, but {other} locks each GPU for "
            "one job. Leave out one of them."
        )


def _check_objective(command: Command, files: dict[Path, str]) -> None:
    """Infer the mode of a new objective from its name, and refuse a name without a known mode.

    With the wrong mode, the run would keep its worst checkpoint as the best.
    """
    typed_keys = {key_of(o): o.partition("=")[2] for o in command.overrides}
    sources = [*(_keys_of(text) for text in files.values()), typed_keys]
    for index, keys in enumerate(sources):
        has_mode = any("mode" in later for later in sources[index:])
        if (name := keys.get("objective")) in (None, "null") or has_mode:
            continue
        if (mode := mode_of(str(name))) is None:
            origin = _origin(command, files, "objective")
            raise UserError(f"{origin}add mode=min if a smaller value is better, else mode=max.")
        command.cfg.mode = mode


def _keys_of(text: str) -> dict[str, Any]:
    keys = yaml.safe_load(text)
    return keys if isinstance(keys, dict) else {}
