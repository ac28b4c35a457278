"""What is wrong with a command or a config, in words that say what to type instead."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from project.checkpoints.files import damage
from project.composition import GROUPS, compose
from project.devices import num_gpus
from project.errors import UserError

# Settings of earlier Lightning versions and of the scripts of that time.
OLD_NAMES = {
    "gpus": "strategy=gpu for one GPU, or strategy=ddp trainer.devices=<number of GPUs>",
    "num_gpus": "trainer.devices=<number of GPUs>",
    "distributed_backend": "strategy=<ddp, ddp_spawn, ...>",
    "accelerator": "strategy=cpu or strategy=gpu",
    "num_processes": "strategy=ddp trainer.devices=<number of processes>",
    "auto_select_gpus": "strategy=gpu",
    "max_nb_epochs": "trainer.max_epochs=<number>",
    "progress_bar_refresh_rate": "callbacks.progress_bar.refresh_rate=<steps>",
}
OLD_STRATEGIES = {
    "ddp_cpu": "ddp with trainer.accelerator=cpu",
    "single_device": "auto",
    "ddp_notebook": "ddp_spawn",
}


def explain(error: Exception, config_name: str, overrides: list[str]) -> str:
    """Say in one or two lines what Hydra or OmegaConf refused."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error)
    if isinstance(error.__cause__, (ConfigKeyError, ConfigAttributeError)):
        return _unknown_key(str(error.__cause__.full_key), config_name, overrides)
    if isinstance(error, OverrideParseException):
        key, equals, value = str(error.override).partition("=")
        if not equals:
            return f"{key!r} is not of the form key=value."
        quoted = value.replace('"', "")
        return (
            f"The value of {key} has characters with a meaning of their own.\n"
            f"Write it in two pairs of quotes: '{key}=\"{quoted}\"'."
        )
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value. Add {error.full_key}=<value>."
    if group := re.match(r"Multiple values for (\w+)\.", str(error)):
        return f"{group[1]} is chosen already: write {group[1]}=<choice>, without a plus sign."
    lines = [line for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {lines[0]}"
    return "\n".join(lines[:2])


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    options = [option for option in error.options or [] if not option.startswith("_")]
    if not group:
        return f"There is no conf/{choice}.yaml."
    if group == "strategy" and choice in OLD_STRATEGIES:
        return f"strategy={choice} is a name of Lightning 1. Use strategy={OLD_STRATEGIES[choice]}."
    return (
        f"{group}={choice}: there is no conf/{group}/{choice}.yaml."
        f"{_did_you_mean(choice, options, prefix=f'{group}=')}\n"
        f"Choices: {', '.join(options)}."
    )


def _unknown_key(key: str, config_name: str, overrides: list[str]) -> str:
    leaf = key.rpartition(".")[2]
    if leaf in OLD_NAMES:
        return f"{key} is a setting of Lightning 1. Use {OLD_NAMES[leaf]}."
    keys = known_keys(config_name, overrides)
    same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
    hint = _did_you_mean(key, [*keys, *GROUPS])
    if same_leaf:  # lr means model.optimizer.lr, however far the two are apart as text
        hint = f" Did you mean {same_leaf[0]}?"
    return f"There is no key {key}.{hint}\nTo add a new one, write +{key}=<value>."


def known_keys(config_name: str, overrides: list[str]) -> list[str]:
    """All keys of the composed config, with the choices of groups that the command made."""
    choices = [text for text in overrides if text.partition("=")[0] in GROUPS and "," not in text]
    return list(_flatten(compose(config_name, choices)))


def _flatten(node: DictConfig, prefix: str = "") -> Iterable[str]:
    for key, child in node.items_ex(resolve=False):
        yield f"{prefix}{key!s}"
        if isinstance(child, DictConfig):
            yield from _flatten(child, f"{prefix}{key!s}.")


def _did_you_mean(name: str, names: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


def check(cfg: DictConfig, task: str, overrides: list[str]) -> None:
    """Refuse a composed config that cannot run.

    Raises:
        UserError: with what to type instead.
    """
    if task != "train" and OmegaConf.is_missing(cfg, "checkpoint"):
        raise UserError(
            "checkpoint has no value. Add checkpoint=<run folder>/checkpoints/best.ckpt."
        )
    for key in OmegaConf.missing_keys(cfg):
        raise UserError(f"{key} has no value. Add {key}=<value>.")
    _check_kinds(task, overrides)
    _check_number(cfg, "data.batch_size", 1)
    _check_number(cfg, "data.max_samples_per_device", 1)
    _check_number(cfg, "data.num_workers", 0)
    _check_number(cfg, "trainer.num_nodes", 1)
    _check_number(cfg, "trainer.accumulate_grad_batches", 1)
    _check_number(cfg, "trainer.max_epochs", -1)
    _check_number(cfg, "seed", 0)
    _check_devices(cfg.trainer)
    if task != "train":
        check_checkpoint(Path(cfg.checkpoint))


def _check_number(cfg: DictConfig, key: str, least: int) -> None:
    value = OmegaConf.select(cfg, key)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{key}={value} must be a whole number, {least} or more.")


def _check_kinds(config_name: str, overrides: list[str]) -> None:
    """Refuse text or a truth value where the YAML file holds a number or a truth value."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    suspects = {
        override.key_or_group: override
        for override in parsed
        if not override.is_add()
        and not override.is_delete()
        and (isinstance(override.value(), bool) or _is_text(override.value()))
        and override.key_or_group not in GROUPS
    }
    if not suspects:
        return
    lines = {override.input_line for override in suspects.values()}
    defaults = compose(config_name, [line for line in overrides if line not in lines])
    for key, override in suspects.items():
        default = OmegaConf.select(defaults, key, throw_on_resolution_failure=False)
        number = isinstance(default, (int, float)) and not isinstance(default, bool)
        if number or (isinstance(default, bool) and _is_text(override.value())):
            kind = "a number" if number else "true or false"
            raise UserError(
                f"{override.input_line}: {key} takes {kind}, for example {key}={default}."
            )


def _is_text(value: Any) -> bool:
    return isinstance(getattr(value, "text", value), str) and "${" not in str(value)


def _check_devices(trainer: DictConfig) -> None:
    accelerator, devices = trainer.accelerator, trainer.devices
    if accelerator in ("dp", "ddp", "ddp2", "ddp_spawn", "ddp_cpu"):
        raise UserError(
            f"trainer.accelerator={accelerator} is a setting of Lightning 1. "
            f"Use strategy={accelerator.replace('_cpu', '')}."
        )
    if accelerator not in ("auto", "gpu", "cuda"):
        return
    available = num_gpus()
    if accelerator != "auto" and available == 0:
        raise UserError(
            f"trainer.accelerator={accelerator} needs a GPU, and none is visible here.\n"
            "Use strategy=auto (a GPU if there is one), or strategy=cpu."
        )
    if available == 0:
        return  # the CPU takes any number of processes
    indices = _device_indices(devices)
    wanted = len(indices) if indices is not None else devices
    if isinstance(wanted, int) and (wanted > available or max(indices or [0]) >= available):
        raise UserError(
            f"trainer.devices={devices}, but this machine shows {available} GPU"
            f"{'s' if available > 1 else ''} (numbered from 0).\n"
            f"Use trainer.devices={available} or fewer, or strategy=cpu."
        )


def _device_indices(devices: Any) -> list[int] | None:
    """The indices in ``[0, 1]`` or ``"0,1"``; ``None`` where ``devices`` is a count or a word."""
    if OmegaConf.is_list(devices):
        return [int(index) for index in devices]
    if isinstance(devices, str) and re.fullmatch(r"\d+(,\d*)+", devices):
        return [int(index) for index in devices.split(",") if index]
    return None


def training_config(checkpoint: Path) -> Path:
    """Where the config of the run that wrote ``checkpoint`` is.

    Raises:
        UserError: if the checkpoint or the config is missing.
    """
    if not checkpoint.is_file():
        there = sorted(str(path) for path in checkpoint.parent.glob("*.ckpt"))
        hint = f" There is {', '.join(there)}." if there else ""
        raise UserError(f"checkpoint={checkpoint}: there is no such file.{hint}")
    config = checkpoint.resolve().parents[1] / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"checkpoint={checkpoint}: there is no {config}, which says how to build its model.\n"
            "Keep a checkpoint in the checkpoints/ folder of its run."
        )
    return config


def check_checkpoint(path: Path) -> None:
    """Refuse a checkpoint that is cut off or damaged; reads the file once.

    ``torch.load`` itself would not notice a flipped bit.
    """
    reason = damage(path)
    if reason:
        raise UserError(
            f"checkpoint={path} is not a checkpoint, or is damaged ({reason})."
            " Use another checkpoint of the run, such as last.ckpt."
        )
