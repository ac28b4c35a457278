"""Choose the emptiest GPUs, before CUDA starts, and keep them from other runs that choose."""

import os
import sys
from collections.abc import Sequence

from harness.errors import UserError
from harness.machine import locks, nvml
from harness.machine.nvml import Gpu, gib
from harness.machine.visible import visible

_ADVICE = "Use fewer trainer.devices or a smaller gpus.min_free_gib, or wait for other runs to end."


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
            states[gpu] = _obstacle(gpu, num_wanted, min_free_gib)
            if not states[gpu] and len(chosen) != num_wanted:
                if locks.acquire(gpu.uuids[0]):
                    chosen.append(gpu)
                else:
                    states[gpu] = locked_by(gpu) or "taken by another run"
        if not chosen or len(chosen) < (num_wanted or 1):
            for gpu in chosen:
                locks.release(gpu.uuids[0])
            found = f"gpus=emptiest looked for {num_wanted or 1}, and {len(chosen)} can be had:"
            hidden = f"hidden by CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
            rows = {gpu: states.get(gpu, hidden) or "free" for gpu in selectable(gpus)}
            raise UserError("\n".join([found, *table(rows), _ADVICE]))
    # Numbers mean the same to NVML and to CUDA in the order of the PCI bus, unless NVML sees a
    # GPU that CUDA does not: then only UUIDs are unambiguous.
    by_uuid = chosen[0].is_mig or not all(gpu.uuids for gpu in gpus)
    names = [gpu.uuids[0] if by_uuid else gpu.number for gpu in chosen]
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return chosen


def candidates(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs and MIG devices that ``CUDA_VISIBLE_DEVICES`` leaves to choose among.

    Raises:
        UserError: if it leaves none, or its numbers are ambiguous.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown, mistake = visible(gpus, value)
    if not shown:
        if value is None:
            raise UserError("gpus=emptiest: this machine has no GPU. Leave out gpus=emptiest.")
        raise UserError(
            f"gpus=emptiest chooses among the GPUs of CUDA_VISIBLE_DEVICES={value}, which shows "
            f"none{f': {mistake}' if mistake else ''}.\nUnset it, or leave out gpus=emptiest."
        )
    # By default CUDA puts the fastest GPU first and documents no order for the others; equal
    # GPUs keep the order of the PCI bus, as NVML has them.
    are_different = len({gpu.name for gpu in gpus}) > 1
    are_numbered = not (value or "").startswith(("GPU-", "MIG-"))
    by_pci_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if len(shown) < len(gpus) and are_different and are_numbered and not by_pci_bus:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={value} counts GPUs in CUDA's own order, fastest first, and "
            "this machine has different ones.\n"
            "Set CUDA_DEVICE_ORDER=PCI_BUS_ID as well to count as nvidia-smi does, or name UUIDs."
        )
    return selectable(shown)


def check() -> None:
    """Raise UserError where there is no GPU to choose from."""
    candidates(_gpus())


def locked_by(gpu: Gpu) -> str:
    """Which run has locked a GPU, in words; empty if none has."""
    process = locks.holder(gpu.uuids[0]) if gpu.uuids else None
    if process is None:
        return ""
    return f"taken by the run of process {process}" if process else "taken by another run"


def selectable(gpus: Sequence[Gpu]) -> list[Gpu]:
    """What a run can use: the GPUs, or their MIG devices where they have some."""
    return [device for gpu in gpus for device in gpu.mig_devices or (gpu,)]


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
        remedy = error.remedy or "Leave out gpus=emptiest."
        raise UserError(f"gpus=emptiest needs an NVIDIA GPU: {error}.\n{remedy}") from error


def _obstacle(gpu: Gpu, num_wanted: int | None, min_free_gib: float) -> str:
    if gpu.problem:
        return gpu.problem
    if gpu.is_mig and num_wanted != 1:
        return "a MIG device, of which CUDA shows only one to a process"
    if gpu.free_bytes < min_free_gib * 2**30:
        return f"less free than gpus.min_free_gib={min_free_gib:g}"
    return ""
