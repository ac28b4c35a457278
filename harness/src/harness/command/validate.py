"""What Hydra accepts and no run can do, refused before torch is imported."""

import math
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from harness import allowed
from harness.checkpoints.lookup import verified
from harness.command import gpus
from harness.command.compose import Command
from harness.command.config_files import groups
from harness.command.explain import OLD_NAMES, old_name
from harness.command.yaml_files import NEEDED
from harness.data.batch_size import check_batch_size
from harness.errors import UserError
from harness.init.settings import file_of, settings
from harness.machine import num_gpus
from harness.names import flat
from harness.processes.launcher import launcher
from harness.strategies import launchable


def check(command: Command) -> None:
    """Refuse a composed command that cannot run.

    Raises:
        UserError: with what to type instead.
    """
    cfg, task, overrides = command.cfg, command.task, command.overrides
    for key in OmegaConf.missing_keys(cfg):
        raise UserError(f"{key} has no value. Add {key}=<value>.")
    for key in NEEDED:
        if key == "data" and key in cfg and cfg.data is None:
            continue  # the model has the loaders
        # What is left of ~trainer is the strategy's part of it.
        if not OmegaConf.is_dict(cfg.get(key)) or (key == "trainer" and "_target_" not in cfg[key]):
            raise UserError(f"{key} was removed, and nothing runs without it. Leave out ~{key}.")
    num_nodes = cfg.trainer.get("num_nodes", 1)
    if command.is_sweep and num_nodes > 1 and not launcher().is_one_of_several:
        raise UserError(
            f"trainer.num_nodes={num_nodes}, but the jobs of a sweep run on the machine that it "
            "was started on.\nUse trainer.num_nodes=1."
        )
    for group in ("experiment", "debug"):
        if OmegaConf.is_dict(cfg.get(group)):
            raise UserError(
                f"conf/{group}/{command.choices.get(group)}.yaml changes nothing: its settings "
                f"arrive below {group}.\nWrite this as its first line: # @package _global_"
            )
    OmegaConf.to_container(cfg, resolve=True)  # before there is a folder
    allowed.check(cfg)
    for override in overrides:
        name = override.lstrip("+~").partition("=")[0]
        if name.partition(".")[0] == "sweep" and task == "train" and not command.is_sweep:
            raise UserError(f"{override} is a setting of a sweep: python train.py -m {override} …")
        if override.startswith("+") and name.rpartition(".")[2] in OLD_NAMES:
            raise UserError(old_name(name))
    if cfg.trainer.get("use_distributed_sampler"):
        raise UserError(
            "trainer.use_distributed_sampler=true would share batches that are shared already.\n"
            "Leave it out."
        )
    _check_kinds(command)
    _check_numbers(cfg, command.rules)
    _check_choices(cfg, command.rules)
    if task == "train":
        check_init(cfg)
        _check_names(cfg)
        _check_tags(cfg)
        _check_objective(cfg, overrides)
        if cfg.resume is not None and cfg.checkpoint is None:
            raise UserError(
                f"resume={cfg.resume} needs its checkpoints: leave out checkpoint=null."
            )
    _check_devices(cfg)
    gpus.check(cfg)
    _check_clipping(cfg)
    if cfg.trainer.get("benchmark") and cfg.trainer.get("deterministic"):
        raise UserError(
            "trainer.benchmark=true takes the kernels that are fastest today, and with "
            "trainer.deterministic=true they must be those of yesterday.\nLeave out one of them."
        )
    if task != "train":
        verified(Path(cfg.checkpoint))
    if any(override.startswith("run_dir=") for override in overrides):
        raise UserError("run_dir is set by the run: use output_dir=<folder> and name=<name>.")
    if any(override.startswith("output=") for override in overrides):
        _check_output(Path(cfg.output))


def check_init(cfg: DictConfig) -> None:
    """Refuse what a run cannot begin with; one that goes on has no use for the file any more."""
    node = cfg.get("init")
    init = settings(
        OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    )
    if init.path is not None and cfg.resume is None:
        file_of(init.path)


def _check_numbers(cfg: DictConfig, rules: dict[str, Any]) -> None:
    for key, least in flat(rules["whole_numbers"]).items():
        value = OmegaConf.select(cfg, key, default=least)
        takes_auto = key in rules["may_be_auto"]
        if (value is None and key in rules["may_be_null"]) or (takes_auto and value == "auto"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            shown = "null" if value is None else value
            word = ", or auto" if takes_auto else ""
            raise UserError(f"{key}={shown} must be a whole number, {least} or more{word}.")
    minutes = cfg.join_minutes
    is_number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
    if not is_number or not 0 < minutes < math.inf:
        raise UserError(f"join_minutes={minutes} must be a number of minutes, more than 0.")
    if cfg.seed >= 2**32:
        raise UserError(f"seed={cfg.seed} must be smaller than 2^32.")


def _check_choices(cfg: DictConfig, rules: dict[str, Any]) -> None:
    accelerator = cfg.trainer.get("accelerator")
    if accelerator in ("dp", "ddp", "ddp2", "ddp_spawn", "ddp_cpu"):
        raise UserError(
            f"trainer.accelerator={accelerator} is a setting of Lightning 1. "
            f"Use strategy={accelerator.replace('_cpu', '')}."
        )
    for key, choices in flat(rules["choices"]).items():
        value = OmegaConf.select(cfg, key, default=choices[0])
        # 0 is no false, though Python says that they are equal.
        if not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in choices
        ):
            named = {None: "null", True: "true", False: "false"}
            words = [named.get(word, word) for word in choices]
            raise UserError(f"{key}={value}: use {', '.join(words[:-1])} or {words[-1]}.")


def _check_objective(cfg: DictConfig, overrides: list[str]) -> None:
    """Refuse a score whose best is not said: the worst checkpoint would be kept as the best."""
    typed = {override.partition("=")[0] for override in overrides}
    if "objective" in typed and "mode" not in typed and cfg.objective is not None:
        raise UserError(
            f"objective={cfg.objective}: add mode=min or mode=max, whichever is the best."
        )


def _check_names(cfg: DictConfig) -> None:
    """A run's folder lies below output_dir."""
    if not cfg.output_dir:
        raise UserError("output_dir has no value. Use output_dir=<folder>, such as outputs.")
    name = str(cfg.name or "")
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise UserError(f"name={name} must be a folder below output_dir, without '..'.")


def _check_tags(cfg: DictConfig) -> None:
    tags, notes = cfg.get("tags", ()), cfg.get("notes")
    if not OmegaConf.is_list(tags) or not all(isinstance(tag, (str, int)) for tag in tags):
        raise UserError(f"tags={tags} is no list of words: use tags=[baseline,lr].")
    if not isinstance(notes, (str, int, float, type(None))):
        raise UserError(f"notes={notes} is no text: use notes='\"why there is this run\"'.")


def _check_output(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"output={path} is a folder. Use output={path / 'predictions.csv'}.")
    if path.suffix != ".csv":
        raise UserError(
            f"output={path} names the table, a CSV; what is none is written beside it as .pt.\n"
            f"Use output={path.with_suffix('.csv')}."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"output={path} cannot be written: {error.strerror}.") from error


def _check_kinds(command: Command) -> None:
    """Refuse text or a truth value where the YAML file holds a number or a truth value.

    The files are read once more only where the command sets such a word.
    """
    known_groups = groups(command.conf)
    suspects = {
        override.key_or_group: override
        for override in OverridesParser.create().parse_overrides(command.overrides)
        if not override.is_add()
        and not override.is_delete()
        and (isinstance(override.value(), bool) or _is_text(override.value()))
        and override.key_or_group not in known_groups
    }
    if not suspects:
        return
    lines = {override.input_line for override in suspects.values()}
    defaults = command.composed_with([line for line in command.overrides if line not in lines])
    for key, override in suspects.items():
        default = OmegaConf.select(defaults, key, throw_on_resolution_failure=False)
        number = isinstance(default, (int, float)) and not isinstance(default, bool)
        takes_auto = key in command.rules["may_be_auto"]
        if takes_auto and override.value() == "auto":
            continue
        if number or (isinstance(default, bool) and _is_text(override.value())):
            kind = "a number" if number else "true or false"
            kind += " or auto" if takes_auto else ""
            raise UserError(
                f"{override.input_line}: {key} takes {kind}, for example {key}={default}."
            )


def _is_text(value: Any) -> bool:
    return isinstance(getattr(value, "text", value), str) and "${" not in str(value)


def _check_devices(cfg: DictConfig) -> None:
    """Refuse devices that are not there, and a launch that waits for what nobody starts."""
    trainer = cfg.trainer
    if not {"accelerator", "devices", "strategy"} <= trainer.keys():
        raise UserError(
            "The strategy was removed, and nothing runs without one. Leave out ~strategy."
        )
    accelerator, devices = trainer.accelerator, trainer.devices
    indices = launchable.device_indices(devices)
    is_number = str(devices).isdigit() and int(devices) > 0
    if not is_number and devices not in ("auto", -1) and indices is None:
        raise UserError(
            f"trainer.devices={devices} must be a number from 1, a list such as [0,1], or auto."
        )
    wanted = len(indices) if indices is not None else devices
    available = 0 if accelerator == "cpu" else num_gpus()
    if accelerator not in ("auto", "cpu") and available == 0:
        raise UserError(
            f"trainer.accelerator={accelerator} needs a GPU, and none is visible here.\n"
            "Use strategy=auto (a GPU if there is one), or strategy=cpu."
        )
    # The CPU takes any number of processes.
    is_count = isinstance(wanted, int) and wanted > 0
    if available and is_count and (wanted > available or max(indices or [0]) >= available):
        raise UserError(
            f"trainer.devices={devices}, but this machine shows {available} GPU"
            f"{'s' if available > 1 else ''} (numbered from 0).\n"
            f"Use trainer.devices={available} or fewer, or strategy=cpu."
        )
    num_processes = launchable.num_processes(trainer)
    batch_size = OmegaConf.select(cfg, "data.batch_size")
    if isinstance(batch_size, int):
        check_batch_size(batch_size, num_processes)
    launchable.check_launcher(trainer, launcher())


def _check_clipping(cfg: DictConfig) -> None:
    """Refuse what Lightning would refuse at the first step; bf16 needs no gradient scaler."""
    clip, precision = cfg.trainer.get("gradient_clip_val"), cfg.trainer.get("precision")
    is_fused = OmegaConf.select(cfg, "model.optimizer.fused", default=False)
    if clip and is_fused and str(precision) in ("16-mixed", "16"):
        raise UserError(
            f"trainer.gradient_clip_val={clip} with trainer.precision={precision} needs gradients "
            "that a fused optimizer does not show.\nAdd model.optimizer.fused=false, or use "
            "trainer.precision=bf16-mixed."
        )
