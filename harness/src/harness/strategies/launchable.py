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

OF_LIGHTNING = (
    "The processes of this strategy are started and ended by Lightning alone: a signal ends them "
    "without a checkpoint, their errors come as tracebacks, data workers start slowly, no speed is "
    "shown, and tests may differ in the last decimals. Prefer strategy=ddp."
)
# Variables of other launchers, such as mpirun.
OTHER_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


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
    num_nodes, devices = int(trainer.num_nodes), trainer.devices
    if strategy_name(trainer) in ("DataParallelStrategy", "DDP2Strategy"):
        return num_nodes
    if (indices := device_indices(devices)) is not None:
        return len(indices) * num_nodes
    if devices not in ("auto", -1, "-1"):
        return int(devices) * num_nodes
    return max(1, num_gpus() if trainer.accelerator != "cpu" else 0) * num_nodes


def num_further(trainer: Any) -> int:
    """Count the processes that Lightning starts on each machine by running the program again."""
    return 0 if is_spawning(trainer) else num_processes(trainer) // int(trainer.num_nodes) - 1


def runs_program_again(trainer: Any) -> bool:
    """Whether this process is not made for a strategy whose processes run the program again."""
    if is_spawning(trainer) or strategy_name(trainer) in ("DataParallelStrategy", "DDP2Strategy"):
        return False
    return "ddp" in str(trainer.strategy).lower() or num_processes(trainer) > 1


def is_spawning(trainer: Any) -> bool:
    """Whether Python's multiprocessing starts the processes."""
    strategy = str(trainer.strategy).lower()
    return "spawn" in strategy or "fork" in strategy


def check_launcher(trainer: Any, launcher: Launcher) -> None:
    """Refuse a strategy that would not make one run of the processes that were started."""
    name, num_nodes = strategy_name(trainer), int(trainer.num_nodes)
    if name == "DataParallelStrategy" and num_nodes > 1:
        raise UserError(
            f"strategy=dp runs on one machine, but trainer.num_nodes={num_nodes}.\n"
            "Use strategy=ddp2 for one process per node, or strategy=ddp for one per device."
        )
    if name in ("DataParallelStrategy", "DDP2Strategy") and trainer.get("sync_batchnorm"):
        raise UserError(
            "dp and ddp2 cannot share BatchNorm statistics between the devices of a process, but "
            "trainer.sync_batchnorm=true.\nUse strategy=ddp, or trainer.sync_batchnorm=false."
        )
    if launcher.name == "python":
        _check_alone(num_nodes)
        return
    several, program = launcher.is_one_of_several, launcher.name
    per_node, where = num_processes(trainer) // num_nodes, "on each machine"
    started = f"{program} has started {launcher.num_processes} process{'es' if several else ''}"
    trains_alone = trainer.strategy == "auto" or (per_node * num_nodes == 1 and "DDP" not in name)
    is_uneven = launcher.num_here * launcher.num_nodes != launcher.num_processes
    if launcher.num_torchruns > launcher.num_nodes:
        raise UserError(
            f"srun has started {launcher.num_torchruns} torchruns, and this one trains with "
            f"{launcher.num_nodes} of them: there would be several trainings.\n"
            "Use srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES --rdzv-backend=c10d "
            "--rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=<first machine>:29400."
        )
    if num_nodes != launcher.num_nodes:
        raise UserError(
            f"trainer.num_nodes={num_nodes}, but {program} runs on {launcher.num_nodes} machines.\n"
            "Leave out trainer.num_nodes: it is taken from there."
        )
    if several and (trains_alone or is_spawning(trainer)):
        raise UserError(
            f"{started}, and with this strategy each would train alone.\n"
            "Add strategy=ddp, or strategy=ddp2 for one process on each machine. A shell of srun "
            "--pty needs --ntasks=1."
        )
    if is_uneven or launcher.local_rank >= launcher.num_here:
        raise UserError(f"{started}, not as many {where}. Start the same number {where}.")
    if per_node != launcher.num_here:
        raise UserError(
            f"This strategy with trainer.devices={trainer.devices} has {per_node} processes "
            f"{where}, but {program} has started {launcher.num_here} {where}.\n"
            "Leave out trainer.devices: it is taken from there. Or use torchrun "
            f"--nproc-per-node={per_node} or srun --ntasks-per-node={per_node}; strategy=ddp2 "
            "takes one."
        )


def _check_alone(num_nodes: int) -> None:
    """Refuse to be one of several processes that nobody has told how to find each other."""
    env = os.environ
    for rank, size in OTHER_LAUNCHERS:
        if rank in env and env.get(size, "").isdigit() and int(env[size]) > 1:
            raise UserError(
                f"{rank}={env[rank]} and {size}={env[size]} are set, but neither by torchrun nor "
                "by srun: each process would train alone.\n"
                "Start them with torchrun or srun, or leave the variables out."
            )
    if num_nodes == 1 and env.get("NODE_RANK", "0") not in ("", "0"):
        raise UserError(
            f"NODE_RANK={env['NODE_RANK']} is set, but trainer.num_nodes=1: each machine would "
            "train alone.\nAdd trainer.num_nodes=<number of machines>, or leave the variable out."
        )
    places = [env.get("MASTER_ADDR"), env.get("MASTER_PORT"), env.get("NODE_RANK")]
    ranks = [str(rank) for rank in range(num_nodes)]
    if num_nodes > 1 and not (all(places) and places[2] in ranks):
        raise UserError(
            f"trainer.num_nodes={num_nodes} needs MASTER_ADDR, MASTER_PORT and NODE_RANK (0 to "
            f"{num_nodes - 1}) on each machine: they would wait for each other.\n"
            f"Set them, or use torchrun --nnodes={num_nodes} or srun."
        )
