"""Choose the emptiest GPUs, before CUDA starts, and lock them against other runs that choose.

In: how many, and what must be free. Out: ``CUDA_VISIBLE_DEVICES``, which further ranks inherit.
A lock is a bound name in Linux's abstract socket namespace, which all users of a machine share: the
system frees it when the process ends, however it ends, and no file is left behind.
"""

import os
import socket
import sys

from harness.errors import UserError
from harness.machine.gpus import Gpu, gib, gpus

PREFIX = "train_"
locks: dict[str, socket.socket] = {}  # that this process holds, by the UUID of the GPU


def choose_emptiest(num_wanted: int | None, min_free_gib: float = 0) -> list[Gpu]:
    """Choose GPUs, by default all that are free, and let CUDA see these, the emptiest first.

    They are locked while this process runs, so another run that chooses gets others.

    Raises:
        UserError: if there are not enough; the message shows what each GPU lacks.
    """
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "CUDA will see no other GPUs"
    release()  # of an earlier choice in this process
    chosen: list[Gpu] = []
    table = ""
    # Python's sort is stable: equally empty GPUs keep their order.
    for gpu in sorted(candidates(), key=lambda gpu: -gpu.free_bytes):
        state = gpu.problem or "free"
        if not gpu.problem and gpu.free_bytes < min_free_gib * 2**30:
            state = f"less free than gpus.min_free_gib={min_free_gib:g}"
        elif not gpu.problem and len(chosen) != num_wanted:
            if lock(gpu.uuid):
                chosen.append(gpu)
            else:
                state = "taken by another run"
        table += f"  GPU {gpu.number} {gpu.name}, {gib(gpu.free_bytes)} free: {state}\n"
    if len(chosen) < (num_wanted or 1):
        release()
        raise UserError(
            f"gpus=emptiest looked for {num_wanted or 1} and found {len(chosen)}:\n{table}Use "
            "fewer trainer.devices or a smaller gpus.min_free_gib, or wait for other runs to end."
        )
    # Unlike numbers, UUIDs mean the same to NVML and CUDA in any order of devices.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in chosen)
    return chosen


def candidates() -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to choose among.

    Raises:
        UserError: if it leaves none, or is neither numbers nor whole UUIDs.
    """
    present, visible = gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not present:
        raise UserError(
            "gpus=emptiest finds no GPU: nvidia-smi shows what NVIDIA's driver has.\n"
            "Leave out gpus=emptiest."
        )
    if visible is None:
        return present
    names = [name.strip() for name in visible.split(",")]
    shown = [gpu for name in names for gpu in present if name and name in (gpu.number, gpu.uuid)]
    if len(shown) != len(names) or len(set(shown)) != len(shown):
        raise UserError(
            f"gpus=emptiest chooses among the GPUs of CUDA_VISIBLE_DEVICES={visible}, which must "
            "be numbers or whole UUIDs of this machine, each once.\n"
            "Change or unset it, or leave out gpus=emptiest."
        )
    return shown


def lock(name: str) -> bool:
    """Lock a GPU for as long as this process runs; ``False`` if another process has it."""
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0{PREFIX}{name}")
    except OSError:
        held.close()
        return False
    locks[name] = held
    return True


def release() -> None:
    """Give all GPUs back; in a forked data worker, which may live longer than its process, too."""
    while locks:
        locks.popitem()[1].close()


os.register_at_fork(after_in_child=release)
