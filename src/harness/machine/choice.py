"""Choose the emptiest GPUs, before CUDA starts, and keep them from other runs that choose."""

import os
import sys
from collections.abc import Sequence

from harness.errors import UserError
from harness.machine import locks, nvml
from harness.machine.nvml import Gpu, gib
from harness.machine.visible import visible


def take_emptiest(num_wanted: int | None, min_free_gib: float = 0) -> list[Gpu]:
    """Choose GPUs and let CUDA see them alone, the emptiest as its device 0.

    Processes that this one starts inherit the choice. The GPUs are locked while this process
    runs; another run that chooses takes others.

    Args:
        num_wanted: how many; ``None`` takes all that are free.
        min_free_gib: memory that each must have free.

    Returns:
        The GPUs in CUDA's order.

    Raises:
        UserError: if there are not so many; the message shows what each GPU lacks.
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
        # Python's sort is stable: of equals, the first is first.
        for gpu in sorted(candidates(gpus), key=lambda gpu: -gpu.free_bytes):
            states[gpu] = _obstacle(gpu, num_wanted, min_free_gib)
            if not states[gpu] and len(chosen) != num_wanted:
                if locks.take(gpu.uuids[0]):
                    chosen.append(gpu)
                else:
                    states[gpu] = taken(gpu) or "taken by another run"
        if not chosen or len(chosen) < (num_wanted or 1):
            for gpu in chosen:
                locks.release(gpu.uuids[0])
            raise UserError(_too_few(gpus, states, num_wanted, len(chosen), min_free_gib))
    # NVML counts by PCI bus as well; it may know a GPU that CUDA is not given, and then only
    # UUIDs are sure.
    by_uuid = chosen[0].is_mig or not all(gpu.uuids for gpu in gpus)
    names = [gpu.uuids[0] if by_uuid else gpu.number for gpu in chosen]
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return chosen


def candidates(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs, and MIG parts of GPUs, that ``CUDA_VISIBLE_DEVICES`` leaves to choose among.

    Raises:
        UserError: if it leaves none, or nobody can tell which.
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
    if len(shown) < len(gpus) and is_order_unknown(gpus):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={value} counts GPUs in CUDA's own order, fastest first, and "
            "this machine has different ones.\n"
            "Set CUDA_DEVICE_ORDER=PCI_BUS_ID as well to count as nvidia-smi does, or name UUIDs."
        )
    return parts(shown)


def is_order_unknown(gpus: Sequence[Gpu]) -> bool:
    """Whether the numbers in ``CUDA_VISIBLE_DEVICES`` may not be those of NVML.

    By default CUDA puts the fastest GPU first, and does not say how it goes on. Equal GPUs keep
    the order of the PCI bus.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    by_pci_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    by_uuid = value.startswith(("GPU-", "MIG-"))
    return len({gpu.name for gpu in gpus}) > 1 and not by_pci_bus and not by_uuid


def check() -> None:
    """Refuse to choose where there is nothing to choose from.

    Raises:
        UserError: says why.
    """
    candidates(_gpus())


def taken(gpu: Gpu) -> str:
    """Who has locked a GPU; empty if nobody has."""
    process = locks.holder(gpu.uuids[0]) if gpu.uuids else None
    if process is None:
        return ""
    return f"taken by the run of process {process}" if process else "taken by another run"


def parts(gpus: Sequence[Gpu]) -> list[Gpu]:
    """What a run can have: the GPUs, or their MIG parts where they have some."""
    return [part for gpu in gpus for part in gpu.parts or (gpu,)]


def table(states: dict[Gpu, str]) -> list[str]:
    """A line per GPU: its number, name and memory, and what there is to say of it."""
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
        return "a MIG part, of which CUDA shows a process only one"
    if gpu.free_bytes < min_free_gib * 2**30:
        return f"less free than gpus.min_free_gib={min_free_gib:g}"
    return ""


def _too_few(
    gpus: Sequence[Gpu],
    states: dict[Gpu, str],
    num_wanted: int | None,
    num_found: int,
    min_free_gib: float,
) -> str:
    wanted = f"{num_wanted} GPU{'s' if num_wanted != 1 else ''}" if num_wanted else "a GPU"
    hidden = f"hidden by CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
    rows = {part: states.get(part, hidden) or "free" for part in parts(gpus)}
    lines = [f"gpus=emptiest looked for {wanted}, and {num_found} can be had:", *table(rows)]
    ways = [f"use trainer.devices={num_found}"] if num_found else []
    ways += ["ask for less with gpus.min_free_gib"] if min_free_gib else []
    last = "wait for other runs to end."
    advice = f"{', '.join(ways)}, or {last}" if ways else last
    lines.append(advice[0].upper() + advice[1:])
    return "\n".join(lines)
