"""The switches that make the same steps faster, and which of them an experiment can take."""

from inspect import signature
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from hydra.utils import get_object
from omegaconf import DictConfig
from torch.optim import Optimizer

from harness.allowed import targets
from harness.errors import UserError
from harness.knobs.speed import check_compiler, networks

# How far a loss of the first steps may be from the plain run's, as a share of their mean. What
# rounds in float32 differs by 1e-6 and grows from step to step; TF32 has 10 bits, bf16 has 7.
EXACT, TF32, BF16 = 1e-3, 1e-2, 5e-2


class Switch(NamedTuple):
    """What is typed behind train.py, and what it may change."""

    words: tuple[str, ...]
    tolerance: float
    why_not: str  # why it is not tried; "" where it is


def switches(cfg: DictConfig, trainer: pl.Trainer, module: pl.LightningModule) -> list[Switch]:
    """Every switch, the quick to try first.

    Args:
        cfg: of the run, as it was typed.
        trainer: that has built the optimizers.
        module: on its device.
    """
    device = trainer.strategy.root_device
    weights = [weight for weight in module.parameters() if weight.dim() == 4]
    on_gpu = "" if device.type == "cuda" else f"is for NVIDIA GPUs, and this is {device.type}"
    no_conv = "" if weights else "no convolution: no weight has 4 dimensions"
    # A run that rounds to few bits is compared as such.
    exact = EXACT if str(cfg.trainer.get("precision", 32))[:2] in ("32", "64") else TF32
    found = {
        "channels_last=true": (exact, no_conv or _layout(weights)),
        **{word: (exact, why) for word, why in _fused(cfg, trainer).items()},
        "tf32=true": (TF32, on_gpu or _tf32(device)),
        "trainer.benchmark=true": (TF32, on_gpu or no_conv),
        "trainer.precision=bf16-mixed": (BF16, _bf16(cfg, device)),
        "compile=true": (exact, _compile(module, device)),
    }
    on = {key: cfg.get(key) is True for key in ("compile", "channels_last", "tf32")}
    on["trainer.benchmark"] = cfg.trainer.get("benchmark") is True
    return [
        Switch(tuple(words.split()), tolerance, "is on" if on.get(words[:-5]) else why)
        for words, (tolerance, why) in found.items()
    ]


def _layout(weights: list[Any]) -> str:
    stored = [weight.is_contiguous(memory_format=torch.channels_last) for weight in weights]
    return "the network stores its weights so itself" if all(stored) else ""


def _tf32(device: torch.device) -> str:
    return "" if torch.cuda.get_device_capability(device)[0] >= 8 else "this GPU has no TF32"


def _bf16(cfg: DictConfig, device: torch.device) -> str:
    if str(cfg.trainer.precision) not in ("32-true", "32"):
        return f"trainer.precision={cfg.trainer.precision} is chosen"
    has_none = device.type == "cuda" and not torch.cuda.is_bf16_supported(False)
    return "this GPU has no bf16" if has_none else ""


def _compile(module: pl.LightningModule, device: torch.device) -> str:
    try:
        check_compiler(device)
    except UserError as error:
        return str(error).splitlines()[0].removeprefix("compile=true ")
    return "" if any(networks(module)) else "no network with parameters is an attribute"


def _fused(cfg: DictConfig, trainer: pl.Trainer) -> dict[str, str]:
    """The words that fuse the config's optimizers, or why there are none."""
    nodes = {key: node for key, node in targets(cfg.model, "model") if _can_fuse(node)}
    off = [f"{'' if 'fused' in n else '+'}{k}" for k, n in nodes.items() if not n.get("fused")]
    if nodes:
        words = " ".join(f"{key}.fused=true" for key in off or nodes)
        return {words: "" if off else "is on"}
    names = ", ".join(dict.fromkeys(type(one).__name__ for one in trainer.optimizers))
    if any("fused" in one.defaults for one in trainer.optimizers):
        return {"fused=true": f"the module's own code makes {names}: write it there"}
    return {"fused=true": f"{names or 'no optimizer'} has no fused implementation"}


def _can_fuse(node: DictConfig) -> bool:
    made = get_object(node["_target_"])
    is_optimizer = isinstance(made, type) and issubclass(made, Optimizer)
    return is_optimizer and "fused" in signature(made).parameters
