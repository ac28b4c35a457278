"""Launches that cannot work, refused without torch: a command asks before it imports torch.

The checks raise a UserError that says what to type instead.
"""

import os
import re
from typing import Any

from omegaconf import OmegaConf

from harness.errors import UserError
from harness.machine import num_gpus


def device_indices(devices: Any) -> list[int] | None:
    """The indices in ``[0, 1]`` or ``"0,1"``; ``None`` where ``devices`` is a count or a word."""
    if OmegaConf.is_list(devices):
        return [int(index) for index in devices]
    if isinstance(devices, str) and re.fullmatch(r"\d+(,\d*)+", devices):
        return [int(index) for index in devices.split(",") if index]
    return None


def strategy_name(trainer: Any) -> str:
    """The class of the config's strategy, or Lightning's word for it."""
    target = OmegaConf.select(trainer, "strategy._target_", default=trainer.strategy)
    return str(target).rpartition(".")[2]


def num_processes(trainer: Any) -> int:
    """Processes that share a batch: one under dp, one per node under ddp2, else one per device."""
    name, num_nodes = strategy_name(trainer), int(trainer.num_nodes)
    if name == "DataParallelStrategy":
        return 1
    if name == "DDP2Strategy":
        return num_nodes
    if (indices := device_indices(trainer.devices)) is not None:
        return len(indices) * num_nodes
    is_all = trainer.devices in ("auto", -1, "-1")
    on_gpus = num_gpus() if is_all and trainer.accelerator != "cpu" else 0
    return (max(1, on_gpus) if is_all else int(trainer.devices)) * num_nodes


def runs_program_again(trainer: Any) -> bool:
    """Whether Lightning starts the further processes by running the same program once more."""
    if strategy_name(trainer) in ("DataParallelStrategy", "DDP2Strategy"):
        return False
    strategy = str(trainer.strategy).lower()
    if "spawn" in strategy or "fork" in strategy:
        return False
    return "ddp" in strategy or num_processes(trainer) > 1


def check_one_node(num_nodes: int) -> None:
    """Refuse dp on several nodes."""
    if num_nodes != 1:
        raise UserError(
            f"strategy=dp runs on one machine, but trainer.num_nodes={num_nodes}.\n"
            "Use strategy=ddp2 for one process per node, or strategy=ddp for one process "
            "per device."
        )


def check_addresses(num_nodes: int) -> None:
    """Refuse several nodes that neither torchrun nor Slurm has told where they meet."""
    limits = {"MASTER_ADDR": None, "MASTER_PORT": 65536, "NODE_RANK": num_nodes}
    for name, limit in limits.items():
        value = os.environ.get(name, "")
        if not value or (limit and not (value.isdigit() and int(value) < limit)):
            found = f"{name}={value}" if value else f"{name} is not set"
            raise UserError(
                f"trainer.num_nodes={num_nodes}, but {found}: machines would wait for each other.\n"
                f"Use torchrun --nnodes={num_nodes} or srun, or set MASTER_ADDR, MASTER_PORT and "
                f"NODE_RANK (0 to {num_nodes - 1}) on each."
            )
