"""Compose a command's words into one config.

In: ``train``, ``evaluate`` or ``predict``, words, and the folder ``conf``. Out: a ``Command``.
Next: ``validate`` checks it. Tests and notebooks call ``compose``, which returns the config alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from harness import allowed
from harness.command import config_files, run_folder
from harness.command.config_files import hydra_compose
from harness.command.explain import OLD_NAMES, check_experiments, explained, old_name
from harness.errors import UserError

TRACKERS = {"wandb", "mlflow"}  # files of conf/logger that are added to the default one
NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
# Settings of Hydra's own runs, and what they are where nobody has set them.
HYDRAS_RUNS = {
    "callbacks": {},
    "mode": None,
    "job_logging": NO_LOGGING,
    "hydra_logging": NO_LOGGING,
    "launcher": {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"},
    "sweeper": {
        "_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "max_batch_size": None,
        "params": None,
    },
}


@dataclass
class Command:
    """A composed command.

    Attributes:
        task: ``train``, ``evaluate`` or ``predict``.
        cfg: what its config files and its words make together.
        overrides: the words, as they were typed.
        conf: the folder of the config files.
        places: words that add further folders of config files.
        choices: the file that was chosen of each group.
        rules: see ``config_files.rules``.
        is_sweep: whether it stands for many runs.
        sweep: settings of the sweep, which are no part of its runs.
        sweep_dir: the folder that a sweep has given to this job; ``None`` outside of sweeps.
    """

    task: str
    cfg: DictConfig
    overrides: list[str]
    conf: Path
    places: list[str] = field(default_factory=list)
    is_sweep: bool = False
    choices: dict[str, str | None] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, Any] = field(default_factory=dict)
    sweep_dir: str | None = None

    def composed_with(self, overrides: Sequence[str]) -> DictConfig:
        """The config that other words make, from the same files."""
        return hydra_compose(self.task, [*self.places, *overrides], self.conf)


def compose(task: str, overrides: Sequence[str] = (), conf: str | Path = "conf") -> DictConfig:
    """Compose the config of a command.

    Args:
        task: ``train``, ``evaluate`` or ``predict``.
        overrides: words as on the command line, such as ``"model=mlp"``.
        conf: the folder of the config files.

    Raises:
        UserError: with what to type instead.
    """
    return compose_command(task, overrides, conf).cfg


def compose_command(task: str, overrides: Sequence[str] = (), conf: str | Path = "conf") -> Command:
    """Compose a command; see ``compose``."""
    conf = Path(conf).resolve()
    if not (conf / "train.yaml").is_file():
        raise UserError(f"conf={conf}: there is no train.yaml. Give the folder of the configs.")
    allowed.follow(conf)
    words = as_hydra_reads(task, overrides, conf)
    with explained(task, words, conf):
        if task == "train":  # no other command has experiments
            check_experiments(words, conf)
        cfg = hydra_compose(task, words, conf, with_hydra=True)
    settings = cfg.hydra
    for name, default in HYDRAS_RUNS.items():
        if settings[name] != default:
            raise UserError(unused(f"hydra.{name} in a YAML file"))
    HydraConfig.instance().set_config(cfg)  # for ${hydra:...} in YAML files
    typed: Any = OmegaConf.to_container(settings.overrides.task)  # ${...} stays as it was typed
    with open_dict(cfg):
        del cfg["hydra"]
        sweep: Any = OmegaConf.to_container(cfg.pop("sweep", OmegaConf.create()), resolve=True)
        if "data" not in cfg and "~data" not in words:  # `override /data: null` in an experiment
            cfg.data = None
    if task == "train":
        cfg.name = str(cfg.name or settings.runtime.choices.get("experiment") or "default")
    return Command(
        task=task,
        cfg=cfg,
        overrides=typed,
        conf=conf,
        places=[word for word in words if word.startswith("hydra.searchpath=")],
        choices=dict(settings.runtime.choices),
        rules=config_files.rules(conf),
        sweep=sweep,
    )


def unused(setting: str) -> str:
    """Say what to use in place of a setting of Hydra's own runs."""
    return (
        f"{setting} has no use here, where no run is a job of Hydra's. Folders are output_dir= and "
        "name=,\ncallbacks are Lightning's, sweeps are python train.py -m <words>; under Slurm see "
        "harness/docs/cluster.md."
    )


def as_hydra_reads(task: str, typed: Sequence[str], conf: Path) -> list[str]:
    """Write in full what has a short form here; refuse what Hydra takes and no command uses."""
    groups = config_files.groups(conf)
    words = []
    for word in typed:
        key, equals, value = word.partition("=")
        name = key.lstrip("+~")
        if name.startswith(("hydra.", "hydra/")) and name != "hydra.searchpath":
            raise UserError(unused(word))
        if name in OLD_NAMES and value[:1] in [*"-[0123456789"]:
            raise UserError(old_name(name))  # Hydra would look for a file of gpus=2
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
            word = f"checkpoint={in_quotes(value)}"
        elif equals and key in groups and (value == "null" or value.isdigit()):
            word = f"{key}='{value}'"  # a file of that name, which Hydra says does not exist
        words.append(word)
    if task != "train":
        store_training_config(words)
    return words


def in_quotes(value: str) -> str:
    """Quote a value with signs that have a meaning for Hydra, such as ``=`` in a file's name."""
    return "'{}'".format(value.replace("'", "\\'"))


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
        keys = ("data", "model", "callbacks", "seed", "name", "compile", "channels_last", "tf32")
        node = {key: whole[key] for key in keys if key in whole}
        needed = {"precision", "inference_mode"} & whole["trainer"].keys()
        node["trainer"] = {key: whole["trainer"][key] for key in needed}
    ConfigStore.instance().store(name="run", node=node, package="_global_")


store_training_config()
