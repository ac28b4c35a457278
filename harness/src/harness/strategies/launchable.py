"""Launches that cannot work, refused without torch: a command asks before it imports torch.

The checks raise a UserError that says what to type instead.
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
# What other launchers tell, such as mpirun.
RANKS_OF_OTHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


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
    if is_spawning(trainer):
        return False
    return "ddp" in str(trainer.strategy).lower() or num_processes(trainer) > 1


def num_further(trainer: Any) -> int:
    """Processes that Lightning starts in this way on each machine."""
    return (
        num_processes(trainer) // int(trainer.num_nodes) - 1 if runs_program_again(trainer) else 0
    )


def is_spawning(trainer: Any) -> bool:
    """Whether Python's multiprocessing starts the processes."""
    strategy = str(trainer.strategy).lower()
    return "spawn" in strategy or "fork" in strategy


def check_launcher(trainer: Any, known: Launcher) -> None:
    """Refuse a strategy that would not make one run of the processes that were started."""
    name, num_nodes = strategy_name(trainer), int(trainer.num_nodes)
    is_dp = name == "DataParallelStrategy"
    if is_dp and num_nodes > 1:
        raise UserError(
            f"strategy=dp runs on one machine, but trainer.num_nodes={num_nodes}.\n"
            "Use strategy=ddp2 for one process per node, or strategy=ddp for one per device."
        )
    if (is_dp or name == "DDP2Strategy") and trainer.get("sync_batchnorm"):
        raise UserError(
            "dp and ddp2 cannot share BatchNorm statistics between the devices of a process, but "
            "trainer.sync_batchnorm=true.\nUse strategy=ddp, or trainer.sync_batchnorm=false."
        )
    if known.name == "python":
        _check_alone(num_nodes)
        return
    several = known.is_one_of_several
    per_node, where = num_processes(trainer) // num_nodes, "on each machine"
    started = f"{known.name} has started {known.num_processes} process{'es' if several else ''}"
    is_alone = trainer.strategy == "auto" or (per_node * num_nodes == 1 and "DDP" not in name)
    refusals = {
        f"srun has started {known.num_torchruns} torchruns, and this one trains with "
        f"{known.num_nodes} of them: there would be several trainings.\n"
        "Use srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES --rdzv-backend=c10d "
        "--rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=<first machine>:29400.": (
            known.num_torchruns > known.num_nodes
        ),
        f"trainer.num_nodes={num_nodes}, but {known.name} runs on {known.num_nodes} machines.\n"
        "Leave out trainer.num_nodes: it is taken from there.": num_nodes != known.num_nodes,
        f"{started}, and with this strategy each would train alone.\n"
        "Add strategy=ddp, or strategy=ddp2 for one process on each machine. A shell of srun --pty "
        "needs --ntasks=1.": several and is_alone,
        f"{started}, and this strategy starts its own. Use strategy=ddp.": (
            several and is_spawning(trainer)
        ),
        f"{started}, not as many {where}. Start the same number {where}.": (
            known.num_here * known.num_nodes != known.num_processes
        ),
        f"This strategy with trainer.devices={trainer.devices} has {per_node} processes {where}, "
        f"but {known.name} has started {known.num_here} {where}.\n"
        "Leave out trainer.devices: it is taken from there. Or use torchrun "
        f"--nproc-per-node={per_node} or srun --ntasks-per-node={per_node}; strategy=ddp2 takes "
        "one.": per_node != known.num_here,
    }
    for sentence, is_so in refusals.items():
        if is_so:
            raise UserError(sentence)


def _check_alone(num_nodes: int) -> None:
    """Refuse to be one of several processes that nobody has told how to find each other."""
    env = os.environ
    for rank, size in RANKS_OF_OTHERS:
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
    limits = {"MASTER_ADDR": None, "MASTER_PORT": 65536, "NODE_RANK": num_nodes}
    for name, limit in limits.items() if num_nodes > 1 else ():
        value = env.get(name, "")
        if not value or (limit and not (value.isdigit() and int(value) < limit)):
            found = f"{name}={value}" if value else f"{name} is not set"
            raise UserError(
                f"trainer.num_nodes={num_nodes}, but {found}: machines would wait for each other.\n"
                f"Use torchrun --nnodes={num_nodes} or srun, or set MASTER_ADDR, MASTER_PORT and "
                f"NODE_RANK (0 to {num_nodes - 1}) on each."
            )
