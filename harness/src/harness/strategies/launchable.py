"""Count the processes of a strategy, and refuse launches that cannot be one training.

In: settings of the Trainer, and the launcher. Out: numbers, or a UserError with what to type
instead. Imports no torch: a command asks before it imports torch. Next: ``processes.ranks``.
"""

import os
import re
from typing import Any

from omegaconf import OmegaConf

from harness.errors import UserError
from harness.machine import is_apple_silicon, num_gpus
from harness.processes.launcher import Launcher

ONE_PROCESS = ("DataParallelStrategy", "DDP2Strategy")  # on each machine, for all its devices
MPI = {"RANK": "WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE", "PMI_RANK": "PMI_SIZE"}
MEETING = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")  # where several machines find each other
REFUSALS = {  # {0} is the Trainer's settings, {1} the launcher
    "spawns": "{0.strategy} has no run to go on with. Use strategy=ddp or dp.",
    "syncs": "dp and ddp2 have no trainer.sync_batchnorm. Use strategy=ddp, or none.",
    "is dp": "trainer.num_nodes={0.num_nodes}: dp takes one machine. Use ddp2 or ddp.",
    "mpi": "{mpi} is set, but not by torchrun or srun. Use one of them, or unset it.",
    "is lost": "trainer.num_nodes={0.num_nodes} with NODE_RANK={node}: several machines need "
    f"trainer.num_nodes, {', '.join(MEETING)} each, or torchrun or srun.",
    "torchruns": "several torchruns on each machine: use srun --ntasks-per-node=1 torchrun.",
    "nodes": "trainer.num_nodes={0.num_nodes}, but {1.name} runs on {1.num_nodes}. Leave it out.",
    "processes": "{1.name} has started {1.num_processes} processes, and this takes {needed} on a "
    "machine. Use strategy=ddp, or ddp2 for one on each, and leave trainer.devices out.",
}


def strategy_name(trainer: Any) -> str:
    """Return the class of the config's strategy, or Lightning's word for it."""
    target = OmegaConf.select(trainer, "strategy._target_", default=trainer.strategy)
    return str(target).rpartition(".")[2]


def num_processes(trainer: Any) -> int:
    """Count the processes of all machines."""
    return (num_further(trainer) + 1) * int(trainer.num_nodes)


def num_further(trainer: Any) -> int:
    """Count the processes on each machine besides the first: one per device, none in dp and ddp2.

    Without a launcher Lightning starts them by running the program again.
    """
    devices = trainer.devices
    if strategy_name(trainer) in ONE_PROCESS:
        return 0
    if OmegaConf.is_list(devices):
        return len(devices) - 1
    if devices in ("auto", -1):
        devices = max(1, num_gpus() if trainer.accelerator != "cpu" else 0)
    return int(devices) - 1


def check_apple(trainer: Any) -> None:
    """Refuse what Apple's GPU lacks: it is one device, without double precision."""
    if trainer.accelerator == "cpu" or not is_apple_silicon():
        return
    instead = "or trainer.accelerator=cpu for the cores"
    num_devices = len(trainer.devices) if OmegaConf.is_list(trainer.devices) else trainer.devices
    if strategy_name(trainer) != "auto" or num_devices not in (1, "auto", -1):
        raise UserError(
            f"Apple's GPU is one device, and {strategy_name(trainer)} with trainer.devices="
            f"{trainer.devices} is for several.\nUse strategy=auto, {instead}."
        )
    if "64" in str(trainer.precision):
        raise UserError(
            f"trainer.precision={trainer.precision}: Apple's GPU has no double precision.\n"
            f"Use trainer.precision=32-true, {instead}."
        )


def check_launcher(trainer: Any, launcher: Launcher) -> None:
    """Refuse a strategy that would not make one run of the processes that were started.

    Raises:
        UserError: says in a line what to type instead.
    """
    name, env, num_nodes = strategy_name(trainer), os.environ, int(trainer.num_nodes)
    needed, node = num_further(trainer) + 1, env.get("NODE_RANK") or "0"
    is_lost = num_nodes > 1 and not all(env.get(key) for key in MEETING)
    is_even = launcher.num_here * launcher.num_nodes == launcher.num_processes
    mpi = next((r for r, size in MPI.items() if r in env and int(env.get(size) or 1) > 1), "")
    is_wrong = {
        "spawns": re.search("spawn|fork|notebook", str(trainer.strategy).lower()),
        "syncs": name in ONE_PROCESS and trainer.get("sync_batchnorm"),
        "is dp": name == "DataParallelStrategy" and num_nodes > 1,
    }
    if launcher.name == "python":
        is_wrong |= {"mpi": mpi, "is lost": is_lost or node not in map(str, range(num_nodes))}
    else:
        is_wrong |= {
            "torchruns": launcher.num_torchruns > launcher.num_nodes,
            "nodes": num_nodes != launcher.num_nodes,
            "processes": not (is_even and needed == launcher.num_here > launcher.local_rank),
        }
    if what := next((what for what, is_so in is_wrong.items() if is_so), ""):
        values = {"needed": needed, "node": node, "mpi": mpi}
        raise UserError(REFUSALS[what].format(trainer, launcher, **values))
