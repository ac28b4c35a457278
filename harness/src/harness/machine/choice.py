"""Choose the emptiest GPUs, before CUDA starts, and keep them from other runs that choose."""

import os
import platform
import re
import sys
from itertools import takewhile

from harness.errors import UserError
from harness.machine import locks, nvml
from harness.machine.nvml import Gpu, gib

_ADVICE = "Use fewer trainer.devices or a smaller gpus.min_free_gib, or wait for other runs to end."


def num_gpus() -> int:
    """GPUs that this process may use: the visible CUDA devices, or Apple's one."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return 1
    try:
        gpus = nvml.gpus()
    except nvml.NoDriverError:
        return 0
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return len(gpus)
    if value.startswith("MIG-"):  # CUDA shows one of them to a process
        return min(len(gpus), 1)
    names = (name.strip() for name in value.split(","))
    return len(list(takewhile(lambda name: any(gpu.is_called(name) for gpu in gpus), names)))


def choose_emptiest(num_wanted: int | None, min_free_gib: float = 0) -> list[Gpu]:
    """Choose GPUs and let CUDA see only these, the emptiest as its device 0.

    Processes that this one starts inherit the choice. The GPUs are locked while this process
    runs, so another run that chooses gets others.

    Args:
        num_wanted: how many; ``None`` for all that are free.
        min_free_gib: GiB of memory that each must have free.

    Raises:
        UserError: if there are not enough; the message shows what each GPU lacks.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("CUDA has started, and will see no other GPUs: choose before that.")
    for uuid in list(locks.HELD):  # of an earlier choice in this process
        locks.release(uuid)
    with locks.choosing():
        gpus = _gpus()
        chosen: list[Gpu] = []
        states: dict[Gpu, str] = {}
        # Python's sort is stable: equally empty GPUs keep their order.
        for gpu in sorted(candidates(gpus), key=lambda gpu: -gpu.free_bytes):
            states[gpu] = gpu.problem or "free"
            if not gpu.problem and gpu.free_bytes < min_free_gib * 2**30:
                states[gpu] = f"less free than gpus.min_free_gib={min_free_gib:g}"
            if states[gpu] == "free" and len(chosen) != num_wanted:
                if locks.acquire(gpu.uuid):
                    chosen.append(gpu)
                else:
                    states[gpu] = "taken by another run"
        if not chosen or len(chosen) < (num_wanted or 1):
            for gpu in chosen:
                locks.release(gpu.uuid)
            found = f"gpus=emptiest looked for {num_wanted or 1}, and {len(chosen)} can be had:"
            raise UserError("\n".join([found, *table(states), _ADVICE]))
    # Numbers mean the same to NVML and to CUDA in the order of the PCI bus, unless NVML sees a
    # GPU that CUDA does not: then only UUIDs are unambiguous.
    by_uuid = not all(gpu.uuid for gpu in gpus)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
        gpu.uuid if by_uuid else gpu.number for gpu in chosen
    )
    return chosen


def candidates(gpus: list[Gpu]) -> list[Gpu]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to choose among.

    Raises:
        UserError: if it leaves none, is neither numbers nor whole UUIDs, or is ambiguous.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        if not gpus:
            raise UserError("gpus=emptiest: this machine has no GPU. Leave out gpus=emptiest.")
        return gpus
    names = [name.strip() for name in value.split(",")]
    shown = [gpu for name in names for gpu in gpus if gpu.is_called(name)]
    if len(shown) != len(names) or len(set(shown)) != len(shown):
        raise UserError(
            f"gpus=emptiest chooses among the GPUs of CUDA_VISIBLE_DEVICES={value}, which must be "
            "numbers or whole UUIDs of this machine, each once.\n"
            "Change or unset it, or leave out gpus=emptiest."
        )
    # By default CUDA puts the fastest GPU first and documents no order for the others; equal
    # GPUs keep the order of the PCI bus, as NVML has them.
    are_numbers = re.fullmatch(r"[\d, ]+", value) and len(shown) < len(gpus)
    are_different = len({gpu.name for gpu in gpus}) > 1
    if are_numbers and are_different and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={value} counts GPUs in CUDA's own order, fastest first, and "
            "this machine has different ones.\n"
            "Set CUDA_DEVICE_ORDER=PCI_BUS_ID as well to count as nvidia-smi does, or name UUIDs."
        )
    return shown


def check() -> None:
    """Raise UserError where there is no GPU to choose from."""
    candidates(_gpus())


def table(states: dict[Gpu, str]) -> list[str]:
    """A line per GPU: its number, name and memory, and its state in words."""
    width = max((len(gpu.name) for gpu in states), default=0)
    return [
        f"  GPU {gpu.number:<4} {gpu.name:<{width}}  "
        f"{gib(gpu.free_bytes):>10} of {gib(gpu.total_bytes):>10} free  {state}"
        for gpu, state in states.items()
    ]


def _gpus() -> list[Gpu]:
    try:
        return nvml.gpus()
    except nvml.NoDriverError as error:
        raise UserError(
            f"gpus=emptiest needs an NVIDIA GPU: {error}.\nLeave out gpus=emptiest."
        ) from error
