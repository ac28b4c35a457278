"""What makes the same steps faster, and rounds them differently: ``compile``, layout, TF32."""

import logging
from collections.abc import Iterator

import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics import Metric

from harness.errors import UserError

log = logging.getLogger(__name__)
SWITCHES = ("compile", "channels_last", "tf32")  # keys of a config


class Speed(pl.Callback):
    """Prepare a module, in the process that computes with it and before anything copies it.

    Neither its attributes nor the names in its ``state_dict`` change. ``compile`` compiles each of
    its networks; ``channels_last`` stores 4-dimensional parameters as (O, H, W, I), in which
    convolutions take and return images as well; ``tf32`` is whether float32 products on a GPU round
    their factors to 10 bits, and ``None`` what torch has set.
    """

    def __init__(
        self, compile: bool = False, channels_last: bool = False, tf32: bool | None = None
    ) -> None:
        self.compile, self.channels_last, self.tf32 = compile, channels_last, tf32

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Change what is to change, once; a test after the training is another stage."""
        if self.tf32 is not None:
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.tf32
        for weight in pl_module.parameters() if self.channels_last else ():
            if weight.dim() == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        if not self.compile:
            return
        from harness.strategies.dp import NodeParallelStrategy  # these two for compile=true alone
        from harness.upstream.networks import compile_networks

        self.compile = False  # it is done
        parts = dict(networks(pl_module))
        if not parts:
            raise UserError(
                f"compile=true: {type(pl_module).__name__} has no network with parameters as an "
                "attribute when it is built.\nGive it one, or leave out compile=true."
            )
        compile_networks([*parts.values()], isinstance(trainer.strategy, NodeParallelStrategy))
        if trainer.is_global_zero:
            log.info("Compiled at their first call: %s.", ", ".join(parts))


def networks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost parts of a module that have parameters and can be called, with names."""
    for name, child in module.named_children():
        if isinstance(child, Metric) or not any(True for _ in child.parameters()):
            continue
        if type(child).forward is nn.Module.forward:  # a ModuleList or ModuleDict
            yield from networks(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
