"""Compose a command's words into one config.

In: ``train``, ``evaluate`` or ``predict``, words, and the folder ``conf``. Out: a ``Command``.
Next: ``check``. Tests and notebooks call ``compose``, which returns the config alone.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

from harness import allowed
from harness.command import config_files, run_folder
from harness.command.config_files import hydra_compose
from harness.command.explain import OLD_WORDS, explained
from harness.errors import UserError
from harness.files import best_checkpoint
from harness.names import is_below
from harness.processes.launcher import launcher
from harness.upstream.interpolations import bounded

TRACKERS = {"wandb", "mlflow"}  # files of logger/ that are added to the default one
# Groups of evaluate.py and predict.py: all else comes from the run that wrote the checkpoint.
EVALUATION_GROUPS = ("trainer", "strategy", "gpus", "watch", "logger")
OF_THE_RUN = ("data", "model", "callbacks", "seed", "name", "compile", "channels_last", "tf32")
# Keys that a group sets elsewhere than below its own name; "" is every key.
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
        cfg: the config of the files and the words.
        overrides: the words, as they were typed; those that add folders of files first.
        conf: the folder of the config files.
        rules: see ``config_files.rules``.
        is_sweep: whether it stands for many runs.
        sweep: settings of the sweep, which are no part of its runs.
        sweep_dir: the folder that a sweep has given to this job; ``None`` outside of sweeps.
    """

    task: str
    cfg: DictConfig
    overrides: list[str]
    conf: Path
    is_sweep: bool = False
    rules: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, Any] = field(default_factory=dict)
    sweep_dir: str | None = None


def compose(task: str, overrides: Sequence[str] = (), conf: str | Path = "conf") -> DictConfig:
    """Compose the config of a command from words, such as ``"model=mlp"``; a UserError if not."""
    return compose_command(task, overrides, conf).cfg


def compose_command(task: str, overrides: Sequence[str] = (), conf: str | Path = "conf") -> Command:
    """Compose a command; a UserError says what to type instead."""
    with bounded():
        return _composed(task, overrides, Path(conf).resolve())


def _composed(task: str, overrides: Sequence[str], conf: Path) -> Command:
    if not (conf / "train.yaml").is_file():
        raise UserError(f"conf={conf}: there is no train.yaml. Give the folder of the configs.")
    allowed.load_rules(conf)
    words = as_hydra_reads(task, overrides, conf)
    saved = words_of_resumed_run(words, conf) if task == "train" else []
    folders = config_files.folders(conf, [*saved, *words])
    config_files.check_sizes(folders)
    with explained(task, [*saved, *words], conf):
        cfg = hydra_compose(task, [*saved, *words], conf, with_hydra=True)
    choices = cfg.hydra.runtime.choices
    config_files.refuse_clash(folders, choices, "trainer", "strategy")
    with open_dict(cfg):
        del cfg["hydra"]
        sweep: Any = OmegaConf.to_container(cfg.pop("sweep", OmegaConf.create()), resolve=True)
        if "data" not in cfg and "~data" not in words:  # `override /data: null` in an experiment
            cfg.data = None
    if task == "train":
        cfg.name = str(cfg.name or choices.get("experiment") or "default")
    rules = config_files.rules(conf)
    refuse_trust_of_files(cfg, words, rules)
    return Command(
        task=task,
        cfg=cfg,
        overrides=sorted(words, key=lambda word: not word.startswith("hydra.searchpath=")),
        conf=conf,
        rules=rules,
        sweep=sweep,
    )


def refuse_trust_of_files(
    cfg: DictConfig, words: Sequence[str], rules: dict[str, Any], place: str = "a YAML file"
) -> None:
    """Refuse a config in which a file, and not the user, has turned on what only a user may."""
    for key in rules["needs_trust"]:
        is_granted = key in rules["trusted"] or key in map(key_of, words)
        if OmegaConf.select(cfg, key) and not is_granted:
            raise UserError(
                f"{key} is true in {place}, which may be a stranger's. If you trust what it reads, "
                f"type {key}=true\nin this command, or write trusted: [{key}] in conf/rules.yaml."
            )


def key_of(word: str) -> str:
    """Return the key that a word sets."""
    return word.lstrip("+~").partition("=")[0]


def unused(setting: str) -> str:
    """Say what to use in place of a setting of Hydra's own runs."""
    return (
        f"{setting} has no use here, as no run is a job of Hydra's: folders are output_dir= and "
        "name=,\ncallbacks are Lightning's, sweeps are python train.py -m <words>."
    )


def as_hydra_reads(task: str, typed: Sequence[str], conf: Path) -> list[str]:
    """Write in full what has a short form here; refuse what Hydra takes and no command uses."""
    groups = config_files.groups(conf)
    words = []
    if "" in typed:
        raise UserError("A word of the command is empty: is a variable of the shell not set?")
    for word, following in itertools.pairwise(typed):
        if "=" not in word + following and word[0] not in "~-":
            raise UserError(f"{word} {following}: write {word}={following}")
    for word in typed:
        key, equals, value = word.partition("=")
        name = key.lstrip("+~")
        if name.startswith(("hydra.", "hydra/")) and name != "hydra.searchpath":
            raise UserError(unused(word))
        for pattern, today in OLD_WORDS.items():
            if re.fullmatch(pattern, word.lstrip("+")):
                raise UserError(f"{word} is a setting of Lightning 1. Use {today}.")
        if task != "train" and name in groups and name not in EVALUATION_GROUPS:
            raise UserError(
                f"{word}: {task}.py takes the config of the checkpoint's run. Leave it out.\n"
                f"It takes {', '.join(f'{group}=' for group in EVALUATION_GROUPS)} and single "
                "keys, such as data.num_workers=4."
            )
        if task == "train" and word in ("experiment=null", "debug=null"):
            continue
        if task == "train" and word == "data=null":
            word = "data=none"
        elif key == "logger" and TRACKERS.issuperset(names := value.strip("[]").split(",")):
            if len(names) == 1 or value.startswith("["):
                word = f"logger=[{','.join(['default', *names])}]"
        elif key in ("init", "init.path") and task == "train" and not value.startswith("{"):
            is_plain = value[:1] in ("'", '"') or not any(sign in value for sign in "= ()[]{}:")
            word = f"init.path={value if is_plain else in_quotes(value)}"
        elif key == "checkpoint" and task != "train" and value[:1] not in ("'", '"'):
            word = f"checkpoint={in_quotes(str(best_checkpoint(Path(value)) or value))}"
        elif equals and key in groups and (value == "null" or value.isdigit()):
            word = f"{key}='{value}'"  # a file of that name, which Hydra says does not exist
        words.append(word)
    if task != "train":
        store_training_config(words)
    return words


def in_quotes(value: str) -> str:
    """Quote a value with signs that have a meaning for Hydra, such as ``=`` in a file's name."""
    return "'{}'".format(value.replace("'", "\\'"))


def words_of_resumed_run(words: Sequence[str], conf: Path) -> list[str]:
    """Return the words that first started the run of ``resume=<run>``, less what these replace.

    How many machines compute it, and how many processes a launcher has started, is of this start.
    """
    named = [word.partition("=")[2].strip("'\"") for word in words if key_of(word) == "resume"]
    if not named or not run_folder.is_run(Path(named[-1])):
        return []
    saved, groups = run_folder.load_words(Path(named[-1])), config_files.groups(conf)
    replaced = ["resume", "trainer.num_nodes", *config_files.rules(conf)["needs_trust"]]
    replaced += ["trainer.devices"] if launcher().name != "python" else []
    for word in words:
        key = key_of(word)
        if key not in groups:
            # Hydra adds or removes a key once, and lets the last of several values win.
            replaced += [key] if word[0] in "+~" or key.startswith("hydra.") else []
        elif word not in saved:
            replaced += SET_BY.get(key, (key.replace("/", "."),))
    return [
        word
        for word in saved
        if word not in words and not is_below(key_of(word).replace("/", "."), replaced)
    ]


def store_training_config(words: Sequence[str] = ()) -> None:
    """Give Hydra, as config ``run``, the settings of the run whose checkpoint the words name.

    conf/evaluate.yaml includes it. Devices, loggers and the Trainer's settings are those of the new
    command, but for the precision and for what a test that takes gradients needs.
    """
    node: dict[str, Any] = {"data": {}, "model": {}, "callbacks": {}}
    values = [word.partition("=")[2] for word in words if word.startswith("checkpoint=")]
    if values and values[-1].strip("'\""):
        checkpoint = Path(values[-1].strip("'\"").replace("\\'", "'"))
        saved = run_folder.load_config(run_folder.config_of_checkpoint(checkpoint).parent)
        whole: Any = OmegaConf.to_container(saved)  # ${run_dir} in it is that of the new command
        node = {key: whole[key] for key in OF_THE_RUN if key in whole}
        needed = {"precision", "inference_mode"} & whole["trainer"].keys()
        node["trainer"] = {key: whole["trainer"][key] for key in needed}
    ConfigStore.instance().store(name="run", node=node, package="_global_")


store_training_config()
