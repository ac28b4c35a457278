"""Which modules can be replicated, on which devices, and what to change in the others."""

from collections.abc import Sequence

import torch
from torch import nn

from harness.errors import UserError
from harness.upstream.replication import is_compiled


def check_module(module: nn.Module) -> None:
    """Refuse a module that cannot be replicated."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.SyncBatchNorm):
            raise UserError(
                f"{name} is a SyncBatchNorm, which shares statistics between processes.\n"
                "Use BatchNorm, or strategy=ddp with trainer.sync_batchnorm=true."
            )
        if isinstance(submodule, torch.jit.ScriptModule):
            raise UserError(
                f"{name or type(submodule).__name__} is a TorchScript module of one device.\n"
                "Use the original module with torch.compile, or strategy=ddp."
            )
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise UserError(
                f"Parameter {name} is lazy and has no shape yet.\n"
                "Run one forward on a small batch in LightningModule.configure_model."
            )
    if is_compiled(module):
        raise UserError(
            f"{type(module).__name__} is compiled as a whole, which hides the call to be split.\n"
            "Compile the networks in it (self.net.compile()) instead."
        )


def check_devices(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Refuse a module that is not on the first device, and devices that damage copies.

    Some machines let GPUs read each other's memory and return garbage (IOMMU in the way).
    """
    root = devices[0]
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != root:
            raise UserError(
                f"{name} is on {tensor.device}, but the first device is {root}.\n"
                "Leave the placement to Lightning: no .to() or .cuda() in the LightningModule."
            )
    sent = torch.arange(4096, device=root)
    for device in dict.fromkeys(devices[1:]):
        if not torch.equal(sent.to(device, copy=True).to(root), sent):
            raise UserError(
                f"Copies from {root} to {device} and back arrive damaged.\n"
                "Repair peer-to-peer access (IOMMU, ACS), or use strategy=ddp with the "
                "environment variable NCCL_P2P_DISABLE=1."
            )
