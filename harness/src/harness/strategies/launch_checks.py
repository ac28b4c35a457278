"""Count the processes of a strategy, and check that the launcher has started as many.

In: settings of the Trainer, and the launcher. Out: numbers, or a UserError with what to type
instead. This file imports no torch, because a command calls it before the import of torch. Next:
``distributed.start_ranks`` starts processes.
"""

import os
import re
from typing import Any

from omegaconf import OmegaConf

from harness.devices import is_apple_silicon, num_gpus
from harness.distributed.launcher import Launcher
from harness.errors import UserError

ONE_PROCESS = ("DataParallelStrategy", "DDP2Strategy")  # one process per machine drives all devices
MPI = {"RANK": "WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE", "PMI_RANK": "PMI_SIZE"}
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")  # how machines find each other
REFUSALS = {  # {0} stands for the Trainer's settings, {1} for the launcher
    "spawns": "strategy={0.strategy} cannot save a checkpoint when a signal ends its processes.\n"
    "Use strategy=ddp or dp.",
    "syncs": "trainer.sync_batchnorm=true does not work with dp and ddp2.\n"
    "Use strategy=ddp, or leave trainer.sync_batchnorm out.",
    "is dp": "strategy=dp runs on one machine, but trainer.num_nodes={0.num_nodes}.\n"
    "Use strategy=ddp2 for one process per machine, or strategy=ddp for one per device.",
    "mpi": "{mpi} is set, but not by torchrun or srun.\n"
    "Start the command with torchrun or srun, or unset {mpi}.",
    "is lost": "trainer.num_nodes={0.num_nodes} with NODE_RANK={node}: several machines need a "
    f"launcher.\nUse torchrun or srun, or set trainer.num_nodes and {', '.join(RENDEZVOUS)}.",
    "torchruns": "There are several torchruns on each machine.\n"
    "Use srun --ntasks-per-node=1 torchrun.",
    "nodes": "trainer.num_nodes={0.num_nodes}, but {1.name} runs on {1.num_nodes} machines.\n"
    "Leave trainer.num_nodes out.",
    "processes": "{1.name} has started {1.num_processes} processes, but these settings need "
    "{needed} per machine.\n"
    "Use strategy=ddp, or ddp2 for one process per machine, and leave trainer.devices out.",
}


def strategy_name(trainer: Any) -> str:
    """Return the class name of the config's strategy, or Lightning's name, such as "auto"."""
    target = OmegaConf.select(trainer, "strategy._target_", default=trainer.strategy)
    return str(target).rpartition(".")[2]


def num_processes(trainer: Any) -> int:
    """Return the number of processes on all machines."""
    return (num_extra_processes(trainer) + 1) * int(trainer.num_nodes)


def num_extra_processes(trainer: Any) -> int:
    """Return how many processes each machine needs besides the one that runs the command.

    There is one process per device, but one per machine in dp and ddp2. Without a launcher, the
    command starts the non-zero ranks, and each of them runs the same script.
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
    """Check that settings suit Apple's GPU: one device, and no double precision.

    Raises:
        UserError: a setting does not suit it.
    """
    if trainer.accelerator == "cpu" or not is_apple_silicon():
        return
    instead = "or trainer.accelerator=cpu to use the CPU"
    num_devices = len(trainer.devices) if OmegaConf.is_list(trainer.devices) else trainer.devices
    if strategy_name(trainer) != "auto" or num_devices not in (1, "auto", -1):
        raise UserError(
            f"Apple's GPU is one device, but {strategy_name(trainer)} with trainer.devices="
            f"{trainer.devices} is for several.\nUse strategy=auto, {instead}."
        )
    if "64" in str(trainer.precision):
        raise UserError(
            f"trainer.precision={trainer.precision}: Apple's GPU has no double precision.\n"
            f"Use trainer.precision=32-true, {instead}."
        )


def check_launcher(trainer: Any, launcher: Launcher) -> None:
    """Check that the strategy's processes are the processes that the launcher has started.

    Raises:
        UserError: the processes differ, or the strategy cannot run here; the message names a
            setting that works.
    """
    name, env, num_nodes = strategy_name(trainer), os.environ, int(trainer.num_nodes)
    needed, node = num_extra_processes(trainer) + 1, env.get("NODE_RANK") or "0"
    is_lost = num_nodes > 1 and not all(env.get(key) for key in RENDEZVOUS)
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
    if reason := next((reason for reason, applies in is_wrong.items() if applies), ""):
        values = {"needed": needed, "node": node, "mpi": mpi}
        raise UserError(REFUSALS[reason].format(trainer, launcher, **values))
