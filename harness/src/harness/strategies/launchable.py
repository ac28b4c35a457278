"""Count the processes of a strategy, and refuse launches that cannot be one training.

In: settings of the Trainer, and the launcher. Out: numbers, or a UserError with what to type
instead. Imports no torch: a command asks before it imports torch. Next: ``processes.early``.
"""

import os
import re
from typing import Any

from omegaconf import OmegaConf

from harness.errors import UserError
from harness.machine import num_gpus
from harness.processes.launcher import Launcher

ONE_PROCESS = ("DataParallelStrategy", "DDP2Strategy")  # on each machine, for all its devices
# Variables of other launchers, such as mpirun.
OTHER_LAUNCHERS = {
    "RANK": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
}


def device_indices(devices: Any) -> list[int] | None:
    """Return the indices in ``[0, 1]`` or ``"0,1"``; ``None`` for a count or a word."""
    if OmegaConf.is_list(devices):
        return [int(index) for index in devices]
    if isinstance(devices, str) and re.fullmatch(r"\d+(,\d*)+", devices):
        return [int(index) for index in devices.split(",") if index]
    return None


def strategy_name(trainer: Any) -> str:
    """Return the class of the config's strategy, or Lightning's word for it."""
    target = OmegaConf.select(trainer, "strategy._target_", default=trainer.strategy)
    return str(target).rpartition(".")[2]


def num_processes(trainer: Any) -> int:
    """Count the processes of all machines: one each under dp and ddp2, else one per device."""
    devices = trainer.devices
    if strategy_name(trainer) in ONE_PROCESS:
        per_node = 1
    elif (indices := device_indices(devices)) is not None:
        per_node = len(indices)
    elif devices not in ("auto", -1, "-1"):
        per_node = int(devices)
    else:
        per_node = max(1, num_gpus() if trainer.accelerator != "cpu" else 0)
    return per_node * int(trainer.num_nodes)


def num_further(trainer: Any) -> int:
    """Count the processes that Lightning starts on each machine by running the program again."""
    return num_processes(trainer) // int(trainer.num_nodes) - 1


def runs_program_again(trainer: Any) -> bool:
    """Return whether the strategy starts processes that run the program again."""
    if strategy_name(trainer) in ONE_PROCESS:
        return False
    return "ddp" in str(trainer.strategy).lower() or num_processes(trainer) > 1


def check_launcher(trainer: Any, launcher: Launcher) -> None:
    """Refuse a strategy that would not make one run of the processes that were started.

    Raises:
        UserError: says in a line what to type instead.
    """
    name, num_nodes, program = strategy_name(trainer), int(trainer.num_nodes), launcher.name
    if re.search("spawn|fork|notebook", str(trainer.strategy).lower()):
        raise UserError(f"{trainer.strategy} has no run to go on with. Use strategy=ddp or dp.")
    if name in ONE_PROCESS and trainer.get("sync_batchnorm"):
        raise UserError("dp and ddp2 have no trainer.sync_batchnorm. Use strategy=ddp, or none.")
    if name == "DataParallelStrategy" and num_nodes > 1:
        raise UserError(f"trainer.num_nodes={num_nodes}: dp takes one machine. Use ddp2 or ddp.")
    if program == "python":
        _check_alone(num_nodes)
        return
    per_node, num_here = num_processes(trainer) // num_nodes, launcher.num_here
    started, where = f"{program} has started {launcher.num_processes} processes", "on each machine"
    trains_alone = trainer.strategy == "auto" or (per_node * num_nodes == 1 and "DDP" not in name)
    is_uneven = num_here * launcher.num_nodes != launcher.num_processes
    if launcher.num_torchruns > launcher.num_nodes:
        raise UserError(f"several torchruns {where}: use srun --ntasks-per-node=1 torchrun.")
    if num_nodes != launcher.num_nodes:
        here = f"{program} runs on {launcher.num_nodes} machines"
        raise UserError(f"trainer.num_nodes={num_nodes}, but {here}. Leave it out.")
    if launcher.is_one_of_several and trains_alone:
        add = f"Add strategy=ddp, or strategy=ddp2 for one process {where}"
        raise UserError(f"{started}, and each would train alone. {add}.")
    if is_uneven or launcher.local_rank >= num_here:
        raise UserError(f"{started}. Start the same number {where}.")
    if per_node != num_here:
        needs = f"trainer.devices={trainer.devices} needs {per_node} processes {where}"
        raise UserError(f"{needs}, but {program} has started {num_here}. Leave it out.")


def _check_alone(num_nodes: int) -> None:
    """Refuse to be one of several processes that nobody has told how to find each other."""
    env = os.environ
    for rank, size in OTHER_LAUNCHERS.items():
        if rank in env and int(env.get(size) or 1) > 1:
            raise UserError(f"{rank} is set, but not by torchrun or srun. Use one, or unset it.")
    node_rank = env.get("NODE_RANK") or "0"
    has_all = all(env.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"))
    if node_rank not in map(str, range(num_nodes)) or (num_nodes > 1 and not has_all):
        raise UserError(
            f"trainer.num_nodes={num_nodes} with NODE_RANK={node_rank}: several machines need "
            "trainer.num_nodes, MASTER_ADDR, MASTER_PORT and NODE_RANK each, or torchrun or srun."
        )
