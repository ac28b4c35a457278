"""Compose the config of a command from its overrides.

In: ``train``, ``evaluate`` or ``predict``, overrides, and the folder ``conf``. Out: a ``Command``.
Next: ``check``. Tests and notebooks call ``compose``, which returns only the config.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from harness import targets
from harness.command import config_files, run_folder
from harness.command.config_files import hydra_compose
from harness.command.hydra_errors import OLD_KEYS, explaining_errors
from harness.compat.hydra_versions import store_config
from harness.compat.interpolations import bounded
from harness.distributed.launcher import launcher
from harness.errors import UserError
from harness.files import best_checkpoint
from harness.keys import is_within

NO_NAME = re.compile(r"(?<![^\[,])(null|\d+)(?![^\],])")  # a value that Hydra does not read as text
TRACKERS = {"wandb", "mlflow"}  # choices of logger= that are added to the default logger
# The groups of evaluate.py and predict.py. All other settings are those of the checkpoint's run.
EVALUATION_GROUPS = ("trainer", "strategy", "gpus", "watch", "logger")
RUN_KEYS = ("data", "model", "callbacks", "seed", "name", "compile", "channels_last", "tf32")
# The keys that a group sets, if they are not below its own name; "" means every key.
SET_BY = {
    "strategy": ("strategy", "trainer.accelerator", "trainer.devices", "trainer.strategy"),
    "watch": ("watch", "callbacks"),
    "experiment": ("",),
    "debug": ("",),
}


@dataclass
class Command:
    """A composed command.

    Attributes:
        task: ``train``, ``evaluate`` or ``predict``.
        cfg: the composed config.
        overrides: the overrides as typed; those of ``hydra.searchpath`` come first.
        conf: the folder of the config files.
        rules: see ``config_files.rules``.
        is_sweep: whether the command runs a sweep.
        sweep: the settings of the sweep, which its runs do not have.
        sweep_dir: the folder of this job of a sweep; ``None`` outside of sweeps.
    """

    task: str
    cfg: DictConfig
    overrides: list[str]
    conf: Path
    is_sweep: bool = False
    rules: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, Any] = field(default_factory=dict)
    sweep_dir: str | None = None

    @property
    def is_on_slurm(self) -> bool:
        """Whether the jobs of this sweep run on a cluster, and not on this machine."""
        return self.is_sweep and "sbatch" in self.sweep


def compose(task: str, overrides: Sequence[str] = (), conf: str | Path = "conf") -> DictConfig:
    """Return the config for overrides such as ``"model=mlp"``; a UserError if one is invalid."""
    return compose_command(task, overrides, conf).cfg


def compose_command(task: str, overrides: Sequence[str] = (), conf: str | Path = "conf") -> Command:
    """Return the composed command.

    Raises:
        UserError: an override or a YAML file is wrong; the message says what to type instead.
    """
    with bounded():
        return _composed(task, overrides, Path(conf).resolve())


def _composed(task: str, overrides: Sequence[str], conf: Path) -> Command:
    if not (conf / "train.yaml").is_file():
        raise UserError(f"conf={conf}: there is no train.yaml. Give the folder of the configs.")
    targets.load_rules(conf)
    overrides = parse_overrides(task, overrides, conf)
    saved = overrides_of_resumed_run(overrides, conf) if task == "train" else []
    folders = config_files.folders(conf, [*saved, *overrides])
    config_files.check_sizes(folders)
    with explaining_errors(task, [*saved, *overrides], conf):
        cfg = hydra_compose(task, [*saved, *overrides], conf, with_hydra=True)
    choices = cfg.hydra.runtime.choices
    config_files.refuse_clash(folders, choices, "trainer", "strategy")
    with open_dict(cfg):
        del cfg["hydra"]
        sweep: Any = OmegaConf.to_container(cfg.pop("sweep", OmegaConf.create()), resolve=True)
        if "data" not in cfg and "~data" not in overrides:  # after override /data: null
            cfg.data = None
    if task == "train":
        with explaining_errors(task, overrides, conf), open_dict(cfg):
            cfg.name = str(cfg.get("name") or choices.get("experiment") or "default")
    rules = config_files.rules(conf)
    refuse_trust_of_files(cfg, overrides, rules)
    return Command(
        task=task,
        cfg=cfg,
        overrides=sorted(overrides, key=lambda o: not o.startswith("hydra.searchpath=")),
        conf=conf,
        rules=rules,
        sweep=sweep,
    )


def refuse_trust_of_files(
    cfg: DictConfig, overrides: Sequence[str], rules: dict[str, Any], place: str = "a YAML file"
) -> None:
    """Raise a ``UserError`` if a YAML file sets a key to true that needs the user's trust."""
    for key in rules["needs_trust"]:
        is_granted = key in rules["trusted"] or key in map(key_of, overrides)
        if OmegaConf.select(cfg, key) and not is_granted:
            raise UserError(
                f"{key} is true in {place}, and a stranger may have written this config. If you "
                f"trust the files that this run reads, type {key}=true\nin this command, or write "
                f"trusted: [{key}] in conf/rules.yaml."
            )


def key_of(override: str) -> str:
    """Return the key that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def unused_setting(setting: str) -> str:
    """Return the message for a setting of Hydra's own runs."""
    return (
        f"{setting.rstrip(':')}: this setting of Hydra has no effect here. Remove it.\n"
        "Use output_dir= and name= for folders, Lightning's callbacks instead of Hydra's, and "
        "python train.py -m <overrides> for sweeps."
    )


def parse_overrides(task: str, typed: Sequence[str], conf: Path) -> list[str]:
    """Return a command's arguments as overrides for Hydra, with short forms written in full.

    Raises:
        UserError: if Hydra accepts an argument, but the command does not use it.
    """
    groups = config_files.groups(conf)
    overrides = []
    if "" in typed:
        raise UserError("An argument is empty. Check that the shell's variables are set.")
    for override, following in itertools.pairwise(typed):
        if "=" not in override + following and override[0] not in "~-":
            raise UserError(f"{override} {following}: write {override}={following}")
    for override in typed:
        key, equals, value = override.partition("=")
        name = key.lstrip("+~")
        if name.startswith(("hydra.", "hydra/")) and name != "hydra.searchpath":
            raise UserError(unused_setting(override))
        for pattern, today in OLD_KEYS.items():
            if re.fullmatch(pattern, override.lstrip("+")):
                raise UserError(f"{override} is a setting of Lightning 1. Use {today}.")
        group = key.replace(".", "/")
        if "." in key and group in groups and re.fullmatch(r"(?!null$)[a-z_]\w*", value):
            raise UserError(
                f"{override}: {key} is a config group. Choose one of its files: {group}={value}"
            )
        if task != "train" and name in groups and name not in EVALUATION_GROUPS:
            raise UserError(
                f"{override}: {task}.py uses the config of the checkpoint's run. Leave out "
                f"{override}.\n{task}.py accepts "
                f"{', '.join(f'{group}=' for group in EVALUATION_GROUPS)} and single keys, such "
                "as data.num_workers=4."
            )
        if task == "train" and override in ("experiment=null", "debug=null"):
            continue
        if task == "train" and override == "data=null":
            override = "data=none"
        elif key == "logger" and TRACKERS.issuperset(names := value.strip("[]").split(",")):
            if len(names) == 1 or value.startswith("["):
                override = f"logger=[{','.join(['default', *names])}]"
        elif key in ("init", "init.path") and task == "train" and not value.startswith("{"):
            is_valid = value[:1] in ("'", '"') or not any(sign in value for sign in "= ()[]{}:")
            override = f"init.path={value if is_valid else in_quotes(value)}"
        elif key == "checkpoint" and task != "train" and value[:1] not in ("'", '"'):
            override = f"checkpoint={in_quotes(str(best_checkpoint(Path(value)) or value))}"
        elif equals and key in groups:  # choices are names of files, which Hydra looks for
            override = f"{key}=" + NO_NAME.sub(r"'\1'", value)
        overrides.append(override)
    if task != "train":
        store_training_config(overrides)
    return overrides


def in_quotes(value: str) -> str:
    """Quote a value for Hydra, because it may contain special characters such as ``=``."""
    return "'{}'".format(value.replace("'", "\\'"))


def overrides_of_resumed_run(overrides: Sequence[str], conf: Path) -> list[str]:
    """Return the overrides that started the run to resume, without those that are replaced now.

    The number of machines and a launcher's number of processes always come from the new command.
    """
    named = [o.partition("=")[2].strip("'\"") for o in overrides if key_of(o) == "resume"]
    if not named or not run_folder.is_run(Path(named[-1])):
        return []
    saved, groups = run_folder.load_overrides(Path(named[-1])), config_files.groups(conf)
    replaced = ["resume", "trainer.num_nodes", *config_files.rules(conf)["needs_trust"]]
    replaced += ["trainer.devices"] if launcher().name != "python" else []
    for override in overrides:
        key = key_of(override)
        if key not in groups:
            # Hydra can add or remove a key only once; of several values, the last one wins.
            replaced += [key] if override[0] in "+~" or key.startswith("hydra.") else []
        elif override not in saved:
            replaced += SET_BY.get(key, (key.replace("/", "."),))
    return [
        override
        for override in saved
        if override not in overrides and not is_within(key_of(override).replace("/", "."), replaced)
    ]


def store_training_config(overrides: Sequence[str] = ()) -> None:
    """Store the settings of the checkpoint's run as Hydra's config ``run``.

    conf/evaluate.yaml includes that config. Devices, loggers and the Trainer's settings come from
    the new command, except for ``precision`` and ``inference_mode``.
    """
    node: dict[str, Any] = {"data": {}, "model": {}, "callbacks": {}}
    values = [o.partition("=")[2] for o in overrides if o.startswith("checkpoint=")]
    if values and values[-1].strip("'\""):
        checkpoint = Path(values[-1].strip("'\"").replace("\\'", "'"))
        saved = run_folder.load_config(run_folder.config_of_checkpoint(checkpoint).parent)
        config: Any = OmegaConf.to_container(saved)  # keeps ${run_dir}, which the new command sets
        node = {key: config[key] for key in RUN_KEYS if key in config}
        needed = {"precision", "inference_mode"} & config["trainer"].keys()
        node["trainer"] = {key: config["trainer"][key] for key in needed}
    store_config("run", node)


store_training_config()
