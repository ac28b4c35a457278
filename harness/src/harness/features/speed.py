"""Make steps faster, which changes rounding: ``compile``, ``channels_last`` and ``tf32``."""

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
    """Prepare a module in each rank, before a strategy copies or shards it.

    The module's attributes and the names in its ``state_dict`` do not change.

    Args:
        compile: whether to compile each of the module's networks.
        channels_last: whether to store 4-dimensional parameters as (O, H, W, I). Convolutions then
            also return images in this layout.
        tf32: whether float32 products on a GPU round their factors to 10 bits of mantissa;
            ``None`` keeps torch's setting.
    """

    def __init__(
        self, compile: bool = False, channels_last: bool = False, tf32: bool | None = None
    ) -> None:
        self.compile, self.channels_last, self.tf32 = compile, channels_last, tf32

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Apply the settings. Each stage calls this, but the module is compiled only once."""
        if self.tf32 is not None:
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.tf32
        for weight in pl_module.parameters() if self.channels_last else ():
            if weight.dim() == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        if not self.compile:
            return
        from harness.compat.networks import compile_networks
        from harness.strategies.dp import NodeParallelStrategy  # only compile=true needs these

        self.compile = False  # do not compile again in the next stage
        found = dict(networks(pl_module))
        if not found:
            raise UserError(
                f"compile=true finds nothing to compile: {type(pl_module).__name__}.__init__ "
                "creates no submodule with parameters.\n"
                "Make the network in __init__, or leave out compile=true."
            )
        compile_networks([*found.values()], isinstance(trainer.strategy, NodeParallelStrategy))
        if trainer.is_global_zero:
            log.info("Compiled at their first calls: %s.", ", ".join(found))


def networks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's outermost submodules with parameters and a forward, each with its name."""
    for name, child in module.named_children():
        if isinstance(child, Metric) or not any(True for _ in child.parameters()):
            continue
        if type(child).forward is nn.Module.forward:  # a ModuleList or ModuleDict
            yield from networks(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
