"""The choice of GPUs that a command asks for: checked before torch is imported, and made."""

from typing import Any

from omegaconf import DictConfig

from harness.errors import UserError
from harness.processes.launcher import launcher
from harness.strategies.launchable import device_indices


def check(cfg: DictConfig) -> None:
    """Refuse a choice of GPUs that cannot be made, or would not be the one that counts.

    Raises:
        UserError: with what to type instead.
    """
    order, least = cfg.gpus.get("order"), cfg.gpus.get("min_free_gib")
    if order == "visible":
        if least is not None:
            raise UserError(f"gpus.min_free_gib={least} is looked at by gpus=emptiest. Add that.")
        return
    if isinstance(least, bool) or not isinstance(least, (int, float)) or least < 0:
        raise UserError(f"gpus.min_free_gib={least} must be a number of GiB, 0 or more.")
    accelerator, devices = cfg.trainer.accelerator, cfg.trainer.devices
    if accelerator in ("cpu", "mps"):
        raise UserError(
            f"gpus=emptiest chooses NVIDIA GPUs, and trainer.accelerator={accelerator} uses none.\n"
            "Leave out one of them."
        )
    if (indices := device_indices(devices)) is not None:
        raise UserError(
            f"trainer.devices={devices} names GPUs, and gpus=emptiest chooses them.\n"
            f"Use trainer.devices={len(indices)}, or leave out gpus=emptiest."
        )
    if (known := launcher()).num_here > 1:
        raise UserError(
            f"gpus=emptiest chooses in one process, and {known.num_here} were "
            "started on this machine.\n"
            "Start one (python train.py strategy=ddp trainer.devices=<number>) which starts the "
            "others, or name GPUs with CUDA_VISIBLE_DEVICES."
        )
    from harness.machine import choice  # asked for by few

    choice.check()


def choose(cfg: Any) -> None:
    """Take the GPUs that the config asks for, and say which they are.

    Raises:
        UserError: if they cannot be had.
    """
    if cfg.gpus.order == "visible":
        return
    check(cfg)
    from harness.machine import choice, nvml

    devices = cfg.trainer.devices
    num_wanted = None if devices in (-1, "auto") else int(devices)
    chosen = choice.choose_emptiest(num_wanted, cfg.gpus.min_free_gib)
    for index, gpu in enumerate(chosen):
        free = f"{nvml.gib(gpu.free_bytes)} of {nvml.gib(gpu.total_bytes)} free"
        print(f"cuda:{index} is GPU {gpu.number}: {gpu.name}, {free}")
