"""From typed words to one composed config: for the command line, for tests and for notebooks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from harness import allowed
from harness.command import config_files, run_folder
from harness.command.explain import explain, refuse_hydras_own, refuse_other_meanings
from harness.command.hydra_calls import hydra_compose
from harness.command.yaml_files import check_experiments, explain_syntax
from harness.errors import UserError

NO_CHOICE = ("experiment=null", "debug=null")  # Hydra takes null in files alone
TRACKERS = {"wandb", "mlflow"}  # files of conf/logger that are beside others


@dataclass
class Command:
    """A composed command.

    Attributes:
        task: ``train``, ``evaluate`` or ``predict``.
        cfg: what its config files and its words make together.
        overrides: the words, as they were typed, but for Hydra's own.
        conf: the folder of the config files.
        places: words before them, of further folders of config files.
        choices: the file that was chosen of each group.
        rules: what is checked, and what may change in a run that goes on; see ``config_files``.
        is_sweep: whether it stands for many runs.
        sweep: settings of the sweep, which are no part of its runs.
        sweep_dir: the folder that a sweep has given to this job, which goes on in it and keeps it;
            ``None`` outside of sweeps.
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
        """The config that other words make, with the same files within reach."""
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
    conf, words = Path(conf).resolve(), list(overrides)
    if not (conf / "train.yaml").is_file():
        raise UserError(f"conf={conf}: there is no train.yaml. Give the folder of the configs.")
    allowed.follow(conf)
    refuse_other_meanings(words)
    words = as_hydra_reads(task, words)
    if task != "train":
        words = with_training_config(words)
    with explained(task, words, conf):
        check_experiments(task, words, conf)
    with explained(task, words, conf):
        cfg = hydra_compose(task, words, conf, with_hydra=True)
    allowed.check_hydra(cfg.hydra)
    refuse_hydras_own(cfg.hydra)
    HydraConfig.instance().set_config(cfg)  # for ${hydra:...} in YAML files
    return from_hydra(task, cfg, conf, words)


@contextmanager
def explained(task: str, overrides: list[str], conf: Path) -> Iterator[None]:
    """Say in a line or two what Hydra, OmegaConf or YAML refuse of a command."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(explain(error, task, overrides, conf)) from error
    except yaml.YAMLError as error:
        raise UserError(explain_syntax(error)) from error


def from_hydra(task: str, cfg: DictConfig, conf: Path, words: Sequence[str]) -> Command:
    """A command from its config and from what Hydra knows of it besides."""
    known: Any = HydraConfig.get()
    with open_dict(cfg):
        cfg.pop("hydra", None)
        sweep: Any = OmegaConf.to_container(cfg.pop("sweep", OmegaConf.create()), resolve=True)
        if "data" not in cfg and "~data" not in words:  # `override /data: null` in an experiment
            cfg.data = None
    typed: Any = OmegaConf.to_container(known.overrides.task)  # ${...} stays as it was typed
    return Command(
        task=task,
        cfg=cfg,
        overrides=typed,
        conf=conf,
        places=[word for word in words if word.startswith("hydra.searchpath=")],
        choices=dict(known.runtime.choices),
        rules=config_files.rules(conf),
        sweep=sweep,
    )


def as_hydra_reads(task: str, words: Sequence[str]) -> list[str]:
    """Words of a command as Hydra takes them: the short ones that it has no notion of, in full.

    ``experiment=null`` is what there is without the word. ``data=null`` chooses a file, which is
    all that Hydra takes for a group; ``init=<path>`` sets the path below ``init``;
    ``logger=wandb`` is beside the loggers of ``logger=default``.
    """
    words = [_beside_default(word) for word in words]
    if task != "train":  # elsewhere the data is no group, and nothing begins
        return words
    words = [word for word in words if word not in NO_CHOICE]
    return [_init_path("data=none" if word == "data=null" else word) for word in words]


def _beside_default(word: str) -> str:
    key, _, value = word.partition("=")
    names = [name.strip() for name in value.strip("[]").split(",")]
    is_one_choice = value.startswith("[") or len(names) == 1
    if key != "logger" or not is_one_choice or not TRACKERS.issuperset(names):
        return word
    return f"logger=[{','.join(['default', *names])}]"


def _init_path(word: str) -> str:
    key, _, value = word.partition("=")
    if key not in ("init", "init.path") or value.startswith("{"):
        return word
    is_plain = value[:1] in ("'", '"') or not any(sign in value for sign in "= ()[]{}:")
    return f"init.path={value}" if is_plain else f"init.path={in_quotes(value)}"


def in_quotes(value: str) -> str:
    """A value with signs that have a meaning for Hydra, such as ``=`` in a file's name."""
    return "'{}'".format(value.replace("'", "\\'"))


def with_training_config(overrides: list[str]) -> list[str]:
    """Let the next composition have the settings of the run that wrote the command's checkpoint."""
    words, checkpoint = [], None
    for word in overrides:
        key, _, value = word.partition("=")
        if key == "checkpoint":
            is_quoted = value[:1] in ("'", '"') and value[-1:] == value[:1]
            checkpoint = value[1:-1] if is_quoted else value
            # Hydra wants quotes around names like epoch=3.ckpt.
            word = f"checkpoint={in_quotes(checkpoint)}"
        words.append(word)
    file = run_folder.config_of_checkpoint(Path(checkpoint)) if checkpoint else None
    store_training_config(file)
    return words


def store_training_config(file: Path | None) -> None:
    """Give Hydra, as config ``run``, what a run has trained on: see conf/evaluate.yaml.

    Devices, loggers and the Trainer's settings are those of the new command, but for the
    precision, for what else rounds, and for what a test that takes gradients needs. Without a
    file, everything stays empty.
    """
    node: dict[str, Any] = {"data": {}, "model": {}, "callbacks": {}}
    if file is not None:
        saved = run_folder.load_config(file.parent)  # keeps ${run_dir}, which will be another one
        whole: Any = OmegaConf.to_container(saved)
        kept = ("data", "model", "callbacks", "seed", "name", "compile", "channels_last", "tf32")
        node = {key: whole[key] for key in kept if key in whole}
        needed = {"precision", "inference_mode"} & saved.trainer.keys()
        node["trainer"] = {key: saved.trainer[key] for key in needed}
    ConfigStore.instance().store(name="run", node=node, package="_global_")


store_training_config(None)
