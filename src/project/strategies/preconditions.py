"""What a module and its devices must be like, with what to change where they are not."""

from collections.abc import Sequence

import torch
from torch import nn

from project.errors import UserError


def check_replicable(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Refuse a module that cannot be split over `devices`.

    Raises:
        UserError: names the part of the module, or the pair of devices.
    """
    root = devices[0]
    for name, part in module.named_modules():
        _refuse_kind(name or type(module).__name__, part)
    if module._compiled_call_impl is not None:  # set by module.compile()
        raise UserError(
            f"{type(module).__name__} is compiled as a whole, which hides the call to be split.\n"
            "Compile the networks in it (self.net.compile()) instead."
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise UserError(
                f"Parameter {name} is lazy and has no shape yet.\n"
                "Run one forward on a small batch in LightningModule.configure_model."
            )
        if tensor.device != root:
            raise UserError(
                f"{name} is on {tensor.device}, but the first device is {root}.\n"
                "Leave the placement to Lightning: no .to() or .cuda() in the LightningModule."
            )
    for device in dict.fromkeys(devices[1:]):
        check_copies(root, device)


def check_copies(root: torch.device, device: torch.device) -> None:
    """Refuse a pair of devices between which copies arrive damaged.

    Some machines let GPUs read each other's memory and return garbage (IOMMU in the way).
    """
    sent = torch.arange(4096, device=root)
    if not torch.equal(sent.to(device, copy=True).to(root), sent):
        raise UserError(
            f"Copies from {root} to {device} and back arrive damaged.\n"
            "Set NCCL_P2P_DISABLE=1 and strategy=ddp, or repair peer-to-peer access (IOMMU, ACS)."
        )


def _refuse_kind(name: str, part: nn.Module) -> None:
    if isinstance(part, nn.SyncBatchNorm):
        raise UserError(
            f"{name} is a SyncBatchNorm, which shares statistics between processes, not devices.\n"
            "Use BatchNorm, or strategy=ddp with trainer.sync_batchnorm=true."
        )
    if isinstance(part, torch.jit.ScriptModule):
        raise UserError(
            f"{name} is a TorchScript module, which cannot be replicated.\n"
            "Use the original module with torch.compile, or strategy=ddp."
        )
