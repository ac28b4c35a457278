"""Check that the devices of a command exist, and that a launch can start on them.

In: a command's config. Out: nothing, or a ``UserError`` with what to type instead.
"""

import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness.devices import VISIBLE, candidates, num_gpus, usable_cores
from harness.distributed.launcher import launcher
from harness.errors import UserError
from harness.strategies import launch_checks

MIN_LIMIT, MAX_PER_CORE = 16, 8  # the limit of processes on the CPU, and the limit per core


def check_devices(cfg: DictConfig) -> None:
    """Refuse devices that do not exist, and a launch that would wait for missing processes."""
    trainer = cfg.trainer
    launch_checks.check_apple(trainer)
    devices, accelerator = trainer.devices, trainer.accelerator
    num_here = num_gpus() if accelerator != "cpu" else 0
    if on_cpu := num_here == 0:
        is_number = devices == "auto" or (isinstance(devices, int) and devices > 0)
        if accelerator not in ("auto", "cpu") or not is_number:
            setting = f"devices={devices}" if not is_number else f"accelerator={accelerator}"
            raise UserError(
                f"trainer.{setting} needs a GPU, and this run has none.\nUse strategy=auto (a GPU "
                "if there is one), strategy=cpu, or trainer.devices=<number of processes>."
            )
    elif devices not in ("auto", -1):
        _check_numbers(devices, num_here)
    batch_size = OmegaConf.select(cfg, "data.batch_size")
    num_processes = launch_checks.num_processes(trainer)
    num_cores = usable_cores()
    num_started = launch_checks.num_extra_processes(trainer) + 1
    if on_cpu and num_started > max(MIN_LIMIT, MAX_PER_CORE * num_cores):
        raise UserError(
            f"trainer.devices={devices} starts {num_started} processes on {num_cores} cores. "
            f"Their imports of torch would take minutes.\nUse trainer.devices={max(2, num_cores)} "
            "or less."
        )
    num_workers = OmegaConf.select(cfg, "data.num_workers")
    if isinstance(num_workers, int) and num_workers > max(32, MAX_PER_CORE * num_cores):
        raise UserError(
            f"data.num_workers={num_workers} is far more than {num_cores} cores can run.\n"
            f"Use data.num_workers=auto, or data.num_workers={num_cores} or less."
        )
    if isinstance(batch_size, int) and batch_size < num_processes:
        raise UserError(
            f"data.batch_size={batch_size} cannot be split between {num_processes} processes: "
            "batch_size counts the samples of one optimizer step over all processes.\n"
            f"Use data.batch_size={num_processes} or more."
        )
    launch_checks.check_launcher(trainer, launcher())


def _check_numbers(devices: Any, num_here: int) -> None:
    """Refuse GPUs that this process does not see, seconds before Lightning would."""
    wanted: list[Any] = [*devices] if OmegaConf.is_list(devices) else []
    if isinstance(devices, int):
        wanted = [*range(devices)]
    if (
        wanted
        and {*map(type, wanted)} == {int}
        and {*wanted} <= {*range(num_here)}
        and len({*wanted}) == len(wanted)
    ):
        return
    numbers = "number 0" if num_here == 1 else f"numbers 0 to {num_here - 1}"
    names = os.environ.get(VISIBLE)
    seen = f"{num_here} GPU{'s' * (num_here > 1)}{f' (of {VISIBLE}={names})' if names else ''}"
    instead = f"Use trainer.devices={num_here} or less, or trainer.accelerator=cpu."
    if OmegaConf.is_list(devices):
        instead = (
            f"Use a list of these numbers, each once, such as trainer.devices=[{num_here - 1}]."
        )
    elif launcher().num_here > 1:
        instead = f"Start {num_here} processes on each machine, and let each see all GPUs there."
    raise UserError(f"trainer.devices={devices}, but this run sees {seen}: {numbers}.\n{instead}")


def check_gpus(cfg: DictConfig) -> None:
    """Refuse ``gpus=emptiest`` if it cannot choose, or if its choice would have no effect."""
    min_free, num_here = cfg.gpus.min_free_gib, launcher().num_here
    if cfg.gpus.order == "visible":
        if min_free is not None:
            raise UserError(f"gpus.min_free_gib={min_free} needs gpus=emptiest. Add gpus=emptiest.")
    elif OmegaConf.is_list(cfg.trainer.devices) or num_here > 1:
        raise UserError(
            "gpus=emptiest chooses the GPUs itself, in one process. Use trainer.devices=<number>, "
            "and start the command without torchrun or srun.\nOr leave out gpus=emptiest, and "
            "name GPUs with CUDA_VISIBLE_DEVICES."
        )
    elif cfg.trainer.accelerator in ("cpu", "mps"):
        raise UserError(
            f"gpus=emptiest needs GPUs, but strategy={cfg.trainer.accelerator} uses no "
            "NVIDIA GPU. Leave out one of the two."
        )
    else:
        candidates()
