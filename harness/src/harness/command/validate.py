"""Check a composed command before anything is written, and before torch is imported.

In: a ``Command``. Out: nothing, or a ``UserError`` that says what to type instead. Next:
``which_run`` chooses the run's folder. What single settings take stands in ``default_rules.yaml``.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from harness import allowed
from harness.checkpoints.lookup import verified
from harness.command.compose import Command
from harness.command.config_files import groups
from harness.command.explain import OLD_NAMES, explained, old_name
from harness.data.batch_size import check_batch_size
from harness.errors import UserError
from harness.init.settings import file_of, settings
from harness.machine import choice, num_gpus
from harness.names import flat, typed
from harness.processes.launcher import launcher
from harness.strategies import launchable

# Keys without which nothing runs, and the word that removes each.
NEEDED = {
    **{name: name for name in ("data", "model", "gpus", "callbacks", "logger")},
    "trainer._target_": "trainer",  # the strategy's part of it is left
    **{f"trainer.{name}": "strategy" for name in ("accelerator", "devices", "strategy")},
}
RANGE = re.compile(r"(-?[\d.]+?)\.\.(\d*)")  # such as 1.. or 0..7 in the rules
KINDS: dict[Any, type] = {"text": str, "list": list}


def check(command: Command) -> None:
    """Refuse a composed command that cannot run, with what to type instead."""
    cfg = command.cfg
    with explained(command.task, command.overrides, command.conf):
        for key in OmegaConf.missing_keys(cfg):
            raise UserError(f"{key} has no value. Add {key}=<value>.")
        values = flat(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
        values |= flat({"sweep": command.sweep})
    for key, word in NEEDED.items():
        if OmegaConf.select(cfg, key) is None and not (key == "data" and "data" in cfg):
            raise UserError(f"{word} was removed, and nothing runs without it. Leave out ~{word}.")
    allowed.check(cfg)
    _check_words(command)
    _check_kinds(command, values)
    _check_values(command, values)
    if command.task == "train":
        _check_training(command)
    else:
        verified(Path(cfg.checkpoint))
    _check_devices(cfg)
    check_gpus(cfg)
    if cfg.trainer.get("benchmark") and cfg.trainer.get("deterministic"):
        raise UserError(
            "trainer.benchmark=true takes the kernels that are fastest today, and with "
            "trainer.deterministic=true they must be those of yesterday.\nLeave out one of them."
        )
    clip, precision = cfg.trainer.get("gradient_clip_val"), str(cfg.trainer.get("precision"))
    if clip and precision in ("16-mixed", "16") and values.get("model.optimizer.fused"):
        raise UserError(
            f"trainer.gradient_clip_val={clip} with trainer.precision={precision} needs gradients "
            "that a fused optimizer does not show.\nAdd model.optimizer.fused=false, or use "
            "trainer.precision=bf16-mixed."
        )


def check_init(cfg: DictConfig) -> None:
    """Refuse weights that a run cannot begin with; one that goes on has no use for them."""
    node: Any = cfg.get("init")
    init = settings(
        OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    )
    if init.path is not None and cfg.resume is None:
        file_of(init.path)


def _check_words(command: Command) -> None:
    """Refuse words by their keys, whatever they set."""
    for word in command.overrides:
        name = word.lstrip("+~").partition("=")[0]
        if name == "run_dir":
            raise UserError("run_dir is set by the run: use output_dir=<folder> and name=<name>.")
        if name == "output":
            output = Path(command.cfg.output)
            if output.suffix != ".csv" or output.is_dir():
                raise UserError(
                    f"output={output} names no table: what is none is written beside it as .pt.\n"
                    f"Use output={output.with_suffix('.csv')}."
                )
        if word.startswith("+") and name.rpartition(".")[2] in OLD_NAMES:
            raise UserError(old_name(name))
        is_of_sweep = name.partition(".")[0] == "sweep" and command.task == "train"
        if is_of_sweep and not command.is_sweep:
            raise UserError(f"{word} is a setting of a sweep: python train.py -m {word} …")
    accelerator = str(command.cfg.trainer.accelerator)
    if accelerator.startswith(("dp", "ddp")):
        raise UserError(
            f"trainer.accelerator={accelerator} is a setting of Lightning 1. "
            f"Use strategy={accelerator.removesuffix('_cpu')}."
        )


def _check_kinds(command: Command, values: dict[str, Any]) -> None:
    """Refuse text or a truth value where the YAML file holds a number or a truth value.

    The files are composed once more, and only where a word sets such a value.
    """
    suspects = {
        override.key_or_group: str(override.input_line)
        for override in OverridesParser.create().parse_overrides(command.overrides)
        if isinstance(values.get(override.key_or_group), (str, bool))
        and not (override.is_add() or override.is_delete())
        and override.key_or_group not in {*groups(command.conf), *command.rules["takes"]}
    }
    if not suspects:
        return
    rest = [word for word in command.overrides if word not in suspects.values()]
    defaults = command.composed_with(rest)
    for key, word in suspects.items():
        default = OmegaConf.select(defaults, key, throw_on_resolution_failure=False)
        is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
        if is_number or (isinstance(default, bool) and isinstance(values[key], str)):
            kind = "a number" if is_number else "true or false"
            raise UserError(f"{word}: {key} takes {kind}, for example {key}={default}.{_env(word)}")


def _check_values(command: Command, values: dict[str, Any]) -> None:
    """Refuse values that the rules do not list; a key that the config lacks is left out."""
    for key, kinds in command.rules["takes"].items():
        if key in values and not any(_is_of(values[key], kind) for kind in kinds):
            *most, last = [_described(kind) for kind in kinds]
            words = [word for word in command.overrides if word.startswith(f"{key}=")]
            takes = f"{', '.join(most)} or {last}" if most else last
            raise UserError(f"{key}={typed(values[key])} must be {takes}.{_env(*words)}")


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is what a rule lists: a range, text, a list, or this very value."""
    if kind in KINDS:
        return isinstance(value, KINDS[kind])
    if (limits := RANGE.fullmatch(str(kind))) is None:
        return bool(value == kind) and isinstance(value, bool) == isinstance(kind, bool)
    numbers = (int, float) if "." in limits[1] else int
    is_number = isinstance(value, numbers) and not isinstance(value, bool)
    return is_number and float(limits[1]) <= value <= float(limits[2] or math.inf)


def _described(kind: Any) -> str:
    if kind == "list":
        return "a list, such as [1,2]"
    if (limits := RANGE.fullmatch(str(kind))) is None:
        return typed(kind)
    number = "a number" if "." in limits[1] else "a whole number"
    return f"{number}, {limits[1]} {f'to {limits[2]}' if limits[2] else 'or more'}"


def _env(*words: str) -> str:
    """Say how a variable of the environment becomes a number: it is text."""
    variables = [match[0] for word in words if (match := re.search(r"\$\{oc\.env:[^}]*\}", word))]
    return "".join(f"\nA variable is text: write ${{oc.decode:{one}}}." for one in variables)


def _check_training(command: Command) -> None:
    cfg = command.cfg
    check_init(cfg)
    if not cfg.output_dir or "${" in os.path.abspath(cfg.output_dir):  # which a config fills in
        raise UserError(
            f"output_dir={typed(cfg.output_dir)} must be a folder, such as outputs, without ${{ in "
            "its path."
        )
    if ".." in Path(cfg.name).parts or Path(cfg.name).is_absolute():
        raise UserError(f"name={cfg.name} must be a folder below output_dir, without '..'.")
    keys = {word.partition("=")[0] for word in command.overrides}
    if "objective" in keys and "mode" not in keys and cfg.objective is not None:
        raise UserError(  # the worst checkpoint would be kept as the best
            f"objective={cfg.objective}: add mode=min or mode=max, whichever is the best."
        )
    if cfg.resume is not None and cfg.checkpoint is None:
        raise UserError(f"resume={cfg.resume} needs its checkpoints: leave out checkpoint=null.")
    num_nodes = cfg.trainer.get("num_nodes", 1)
    if command.is_sweep and num_nodes > 1 and not launcher().is_one_of_several:
        raise UserError(
            f"trainer.num_nodes={num_nodes}, but the jobs of a sweep run on the machine that it "
            "was started on.\nUse trainer.num_nodes=1."
        )


def _check_devices(cfg: DictConfig) -> None:
    """Refuse devices that do not exist, and a launch that waits for what nobody starts."""
    trainer = cfg.trainer
    if trainer.accelerator not in ("auto", "cpu") and num_gpus() == 0:
        raise UserError(
            f"trainer.accelerator={trainer.accelerator} needs a GPU, and none is visible here.\n"
            "Use strategy=auto (a GPU if there is one), or strategy=cpu."
        )
    batch_size = OmegaConf.select(cfg, "data.batch_size")
    if isinstance(batch_size, int):
        check_batch_size(batch_size, launchable.num_processes(trainer))
    launchable.check_launcher(trainer, launcher())


def check_gpus(cfg: DictConfig) -> None:
    """Refuse a choice of GPUs that cannot be made, or would not be the one that counts."""
    least, devices = cfg.gpus.get("min_free_gib"), cfg.trainer.devices
    if cfg.gpus.order == "visible":
        if least is not None:
            raise UserError(f"gpus.min_free_gib={least} is looked at by gpus=emptiest. Add that.")
        return
    if cfg.trainer.accelerator in ("cpu", "mps") or OmegaConf.is_list(devices):
        raise UserError(
            "gpus=emptiest chooses NVIDIA GPUs by their number, but trainer.accelerator="
            f"{cfg.trainer.accelerator} and trainer.devices={devices}.\nLeave out gpus=emptiest, "
            "or use trainer.devices=<number>."
        )
    if (started_by := launcher()).num_here > 1:
        raise UserError(
            f"gpus=emptiest chooses in one process, and {started_by.num_here} were started on this "
            "machine.\nStart one (python train.py strategy=ddp trainer.devices=<number>) which "
            "starts the others, or name GPUs with CUDA_VISIBLE_DEVICES."
        )
    choice.candidates()
