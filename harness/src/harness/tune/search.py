"""Choose a batch size, data workers and a learning rate by trials, and print the measurements.

In: a checked command of train.py. Out: tables, and a line of overrides to paste. The trials run in
a temporary folder.
"""

import logging
import re
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from omegaconf import OmegaConf

from harness.command.compose import Command
from harness.command.main import choose_gpus
from harness.devices import gib, usable_cores
from harness.errors import UserError
from harness.keys import flatten, last_part
from harness.monitoring.verdict import INPUT_BOUND
from harness.strategies.launch_checks import num_processes
from harness.training.user_errors import OUT_OF_MEMORY
from harness.tune.trials import (
    Steps,
    find_rate,
    measure_loader,
    measure_steps,
    single_device_config,
)

GAIN = 1.05  # speedup below which a larger batch does not count as faster
DISTURBED = 1.2  # by which a step may take longer than one of a batch twice as large
NUM_STEPS = 10  # steps that an epoch must have with a larger batch
MAX_SECONDS = 60  # limit for all batch sizes, and for the search for a rate
NUM_RATES = 100
BATCH_SIZE, NUM_WORKERS = "data.batch_size", "data.num_workers"
RATES = ("lr", "learning_rate")


def tune(command: Command) -> None:
    """Choose batch size, workers and learning rate, and print them as a line of overrides.

    Raises:
        UserError: if a single sample does not fit, or the loader gives no batch.
    """
    single = OmegaConf.merge(command.cfg.trainer, {"strategy": "auto"})
    # Devices that split a global batch. With its strategy, dp would count as one process.
    num_devices = num_processes(single)
    is_on_cpu = command.cfg.trainer.accelerator == "cpu" or not torch.accelerator.is_available()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cfg = single_device_config(command.cfg, folder)
        choose_gpus(cfg)
        device = f"{usable_cores()} CPU cores"
        if not is_on_cpu:
            is_cuda = torch.cuda.is_available()
            device = torch.cuda.get_device_name() if is_cuda else "Apple's GPU"
        say(f"Measured on {device}, in one process, without validation, callbacks,")
        say("loggers and compile=true.")
        if num_devices > 1:
            say(f"{num_devices} devices split a batch. The table shows one local batch.")
        paste: list[str] = []
        logging.disable(logging.WARNING)  # each trial would repeat the warnings of a training
        try:
            best = tune_batch_size(cfg, num_devices, paste)
            tune_workers(cfg, best, paste)
            tune_rate(cfg, best, num_devices, paste)
        finally:
            logging.disable(logging.NOTSET)
    say(f"\nAdd this to your command:\n{' '.join(paste)}" if paste else "\nNothing to add.")


def say(text: str) -> None:
    """Print a line, and flush it."""
    print(text, flush=True)


def tune_batch_size(cfg: Any, num_devices: int, paste: list[str]) -> Steps:
    """Double one device's local batch until it does not fit or is not faster, and set the best.

    If the first size does not fit, it is halved until it fits. If the config has no
    ``data.batch_size``, only the size that the loaders have is measured.
    """
    size: int | None = OmegaConf.select(cfg, BATCH_SIZE)
    size = max(1, size // num_devices) if isinstance(size, int) else None
    say(f"\n{'batch size':>12} {'samples/s':>12} {'ms a step':>12}{memory_of(cfg)}")
    rows: list[Steps] = []
    started, num_slow, too_large, why = time.monotonic(), 0, 0, ""
    while not why:
        if size is not None:
            cfg.data.batch_size = size
        try:
            if not rows and not too_large:
                measure_steps(cfg, size)  # warm up, because the first trial is slower
            steps = measure_steps(cfg, size)
        except Exception as error:
            if not re.search(OUT_OF_MEMORY, str(error)):
                if not rows:
                    raise
                why = f"A batch of {size} fails: {str(error).partition(chr(10))[0][:200]}"
                break
            steps = None
        if steps is None:
            say(f"{size or 'all':>12}  does not fit into memory")
            if rows:
                why = f"A batch of {size} does not fit."
            elif not size or size == 1:
                raise UserError("A single sample does not fit into memory. Use a smaller model.")
            else:
                too_large, size = size, size // 2
            continue
        row = f"{steps.num_samples:>12,} {steps.speed:>12,.0f} {1000 * steps.seconds:>12,.1f}"
        say(row + (f" {gib(steps.num_bytes):>12}" if steps.num_bytes else ""))
        num_slow = num_slow + 1 if rows and steps.speed < GAIN * max(r.speed for r in rows) else 0
        rows.append(steps)
        if size is None:
            why = f"The config has no {BATCH_SIZE}. Set the batch size in the code of your loaders."
        elif too_large:
            why = f"A batch of {too_large} does not fit."
        elif steps.num_samples == steps.num_all or steps.num_samples < size:
            why = "The data set has no more samples."
        elif num_slow == 2:
            why = "Larger batches are not 5 % faster."
        elif time.monotonic() - started > MAX_SECONDS:
            why = f"The search ended after {MAX_SECONDS} s."
        else:
            size *= 2
    # One batch with all samples of a small data set would be fastest, but would train badly.
    max_size = max(rows[0].num_samples, rows[0].num_all // (NUM_STEPS * num_devices))
    usable = [row for row in rows if row.num_samples <= max_size or not row.num_all]
    best = next(r for r in usable if GAIN * r.speed >= max(row.speed for row in usable))
    if size is not None:
        cfg.data.batch_size = best.num_samples
        limit = f" with {NUM_STEPS} steps per epoch" if len(usable) < len(rows) else ""
        why += f"\n{best.num_samples:,} is the smallest within 5 % of the fastest size{limit}."
        paste.append(f"{BATCH_SIZE}={best.num_samples * num_devices}")
    if any(DISTURBED * more.seconds < less.seconds for less, more in pairwise(rows)):
        why += "\nA larger batch took less time than a smaller one, so other programs slow this"
        why += "\none down. Run the command again when nothing else runs."
    say(why)
    return best


def memory_of(cfg: Any) -> str:
    """Return the title of the table's memory column, or "" without a CUDA GPU."""
    if cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        return ""
    return f" {'memory':>12} of {gib(torch.cuda.mem_get_info()[1])}"


def tune_workers(cfg: Any, best: Steps, paste: list[str]) -> None:
    """Choose the smallest number of workers that read batches as fast as the steps need them."""
    if NUM_WORKERS not in flatten(cfg):
        say(f"\nThe config has no {NUM_WORKERS}. Set num_workers in the code of your loaders.")
        return
    say(f"\n{'workers':>12} {'samples/s':>12} from the loader; steps need {best.speed:,.0f}")
    needed, speeds = 1 / best.seconds, dict[int, float]()
    for num in (0, *(2**i for i in range(8) if 2**i <= usable_cores())):
        speeds[num] = measure_loader(cfg, num)
        say(f"{num:>12} {speeds[num] * best.num_samples:>12,.0f}")
        # Without workers a step waits for its batch, so reading may take only a tenth of the step.
        if speeds[num] >= needed / (1 if num else INPUT_BOUND):
            break
    chosen = next(num for num in speeds if GAIN * speeds[num] >= max(speeds.values()))
    if speeds[num] >= needed / (1 if num else INPUT_BOUND):
        say(f"{num} is the smallest number for which steps do not wait for data.")
        chosen = num
    else:
        say(f"{chosen} is the fastest, but steps wait for data. Read whole batches, or make the")
        say("transforms cheaper.")
    paste.append(f"{NUM_WORKERS}={chosen}")


def tune_rate(cfg: Any, best: Steps, num_devices: int, paste: list[str]) -> None:
    """Find the learning rate at which the loss falls fastest, with the chosen batch size."""
    if best.is_manual:
        say(
            "\nNo learning rate: the module has its own loop (automatic_optimization=False), with "
            f"\n{best.num_optimizers} optimizers. Try rates in a sweep: python train.py -m …"
        )
        return
    if num_devices > 1 and BATCH_SIZE in flatten(cfg):  # the global batch, as micro-batches
        cfg.data.batch_size *= num_devices
        cfg.trainer.accumulate_grad_batches *= num_devices
    num_steps = max(30, min(NUM_RATES, int(MAX_SECONDS / best.seconds / num_devices)))
    rate = find_rate(cfg, num_steps)
    if isinstance(rate, str):
        say(f"\nNo learning rate: {rate}.")
        return
    say(f"\nlearning rate {rate:.2g}: the loss falls fastest there, in {num_steps} steps.")
    say("Use it as a constant rate, or as the largest rate of a schedule.")
    numbers = [k for k, v in flatten(cfg.model, "model.").items() if type(v) in (int, float)]
    keys = [key for key in numbers if last_part(key) in RATES]
    if len(keys) == 1:
        paste.append(f"{keys[0]}={rate:.2g}")
    else:
        found = f"{' and '.join(keys)}" if keys else "no key model.….lr"
        say(f"Set the rate by hand, because the config has {found}.")
