"""Decide what limits a run, and which setting to change.

In: the seconds that ``Throughput`` has measured, and the settings of the run. Out: a text that
begins with input-bound, host-bound or device-bound.
"""

import math
import os
from dataclasses import astuple, dataclass

import torch

CROWDED = 1.5  # load per core; above it, other programs slow this one down
RECEIVING_SECONDS = 0.001  # time to receive a batch from a worker; a faster data set needs none
INPUT_BOUND = 0.1  # fraction of the time waiting for data; above it, a change is worthwhile
MOST = 0.5  # fraction of the time, or of the steps
BUSY = 0.9  # a GPU above this utilisation is not host-bound, although its queue may run empty


@dataclass
class Spent:
    """The time, the steps and the samples of an epoch or a training run."""

    data: float = 0.0  # seconds of waiting for the next batch, part of ``seconds``
    seconds: float = 0.0
    num_steps: int = 0
    num_samples: int = 0  # summed over all ranks
    num_drained: int = 0  # steps before whose end the GPU had finished the backward pass

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Setup:
    """The settings of a run that a verdict may suggest to change; workers are per rank."""

    num_workers: int = 0
    max_workers: int = 1
    faster_precision: str | None = None  # a value of trainer.precision
    is_compiled: bool = False
    is_on_gpu: bool = False
    gpu_busy: float | None = None  # fraction of the time in which a kernel ran; None if unknown


def verdict(spent: Spent, setup: Setup) -> str:
    """Return a text that names the limit of a run and the setting to change.

    A run is host-bound in two cases:

    - A batch arrives within a millisecond, but this is more than a tenth of a step.
    - In most steps the GPU has finished the backward pass before the host ends the step, and the
      GPU is busy less than 90 % of the time.
    """
    fraction, wait_seconds = spent.data / spent.seconds, spent.data / spent.num_steps
    text = f"{fraction:.0%} of the time waiting for data"
    is_overhead = wait_seconds < RECEIVING_SECONDS and fraction < MOST
    if fraction > INPUT_BOUND and not is_overhead:
        bound, hint = "input-bound", _faster_data(spent, setup)
    elif fraction > INPUT_BOUND:
        text = f"{fraction:.0%} of a step of {1000 * spent.seconds / spent.num_steps:.1f} ms"
        bound, text = "host-bound", f"{text} is spent on fetching the next batch"
        hint = _fewer_steps(setup)
    elif spent.num_drained > MOST * spent.num_steps and (setup.gpu_busy or 0.0) < BUSY:
        drained = f"{spent.num_drained / spent.num_steps:.0%} of the steps"
        bound, text = "host-bound", f"Python is slower than the GPU in {drained}"
        hint = _fewer_steps(setup)
    else:
        bound, hint = "device-bound", _faster_device(setup)
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > CROWDED * num_cores:
        one_thread = ", and OMP_NUM_THREADS=1 may be faster" * (torch.get_num_threads() > 1)
        hint = f"other programs slow this one down: {num_cores} cores have a load of {load:.1f}"
        hint += one_thread
    return f"{bound}: {text}; {hint}"


def _faster_data(spent: Spent, setup: Setup) -> str:
    num_workers = setup.num_workers
    # In an input-bound run each worker is busy all the time.
    seconds = num_workers * spent.seconds if num_workers else spent.data
    needed = seconds / max(spent.seconds - spent.data, 1e-6)
    is_fast = num_workers == 0 and spent.data / spent.num_steps < RECEIVING_SECONDS
    num_wanted = math.ceil(min(needed, setup.max_workers))
    if num_wanted > num_workers and not is_fast:
        return f"try data.num_workers={num_wanted} (now {num_workers})"
    return "read whole batches (BatchedDataset) or make the transforms cheaper"


def _fewer_steps(setup: Setup) -> str:
    return "try a larger data.batch_size" + " or compile=true" * (not setup.is_compiled)


def _faster_device(setup: Setup) -> str:
    hints = [f"trainer.precision={setup.faster_precision}"] if setup.faster_precision else []
    hints += ["compile=true"] * (not setup.is_compiled)
    more = "more GPUs (trainer.devices)" if setup.is_on_gpu else "a GPU"
    return f"try {' or '.join(hints or [more])}"
