"""Choose the emptiest GPUs, before CUDA starts, and lock them against other runs that choose.

In: how many, and what must be free. Out: ``CUDA_VISIBLE_DEVICES``, which further ranks inherit.
A lock is a bound name in Linux's abstract socket namespace, which all users of a machine share: the
system frees it when the process ends, however it ends, and no file is left behind.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from harness.errors import UserError
from harness.machine.gpus import Gpu, NoDriverError, gib, gpus

PREFIX = "train_"
WAIT_SECONDS = 30.0
locks: dict[str, socket.socket] = {}  # that this process holds, by the UUID of the GPU


def choose_emptiest(num_wanted: int | None, min_free_gib: float = 0) -> list[Gpu]:
    """Choose GPUs and let CUDA see only these, the emptiest as its device 0.

    The GPUs are locked while this process runs, so another run that chooses gets others.

    Args:
        num_wanted: how many; ``None`` for all that are free.
        min_free_gib: GiB of memory that each must have free.

    Raises:
        UserError: if there are not enough; the message shows what each GPU lacks.
    """
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "CUDA will see no other GPUs"
    release()  # of an earlier choice in this process
    states: dict[Gpu, str] = {}
    chosen: list[Gpu] = []
    with _choosing():
        # Python's sort is stable: equally empty GPUs keep their order.
        for gpu in sorted(candidates(), key=lambda gpu: -gpu.free_bytes):
            states[gpu] = gpu.problem or "free"
            if not gpu.problem and gpu.free_bytes < min_free_gib * 2**30:
                states[gpu] = f"less free than gpus.min_free_gib={min_free_gib:g}"
            if states[gpu] == "free" and len(chosen) != num_wanted:
                if lock(gpu.uuid):
                    chosen.append(gpu)
                else:
                    states[gpu] = "taken by another run"
    if len(chosen) < (num_wanted or 1):
        release()
        raise UserError(
            f"gpus=emptiest looked for {num_wanted or 1}, and {len(chosen)} can be had:\n"
            f"{_table(states)}Use fewer trainer.devices or a smaller gpus.min_free_gib, or wait "
            "for other runs to end."
        )
    # Unlike numbers, UUIDs mean the same to NVML and CUDA in any order of devices.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in chosen)
    return chosen


def candidates() -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to choose among.

    Raises:
        UserError: if it leaves none, or is neither numbers nor whole UUIDs.
    """
    try:
        found = gpus()
    except NoDriverError as error:
        raise UserError(
            f"gpus=emptiest needs an NVIDIA GPU: {error}.\nLeave out gpus=emptiest."
        ) from error
    if not found:
        raise UserError("gpus=emptiest: this machine has no GPU. Leave out gpus=emptiest.")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    names = [name.strip() for name in visible.split(",")]
    shown = [gpu for name in names for gpu in found if name and name in (gpu.number, gpu.uuid)]
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


@contextmanager
def _choosing() -> Iterator[None]:
    """Let one process at a time choose: each sees what the one before has locked."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not lock("choice"):
        if time.monotonic() > deadline:
            raise UserError(
                f"Another process has been choosing GPUs for {WAIT_SECONDS:.0f} seconds.\n"
                "End it, or name the GPUs with CUDA_VISIBLE_DEVICES and leave out gpus=emptiest."
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        locks.pop("choice").close()


def _table(states: dict[Gpu, str]) -> str:
    """Write a line per GPU: its number, name and memory, and its state in words."""
    width = max(len(gpu.name) for gpu in states)
    return "".join(
        f"  GPU {gpu.number:<4} {gpu.name:<{width}}  "
        f"{gib(gpu.free_bytes):>10} of {gib(gpu.total_bytes):>10} free  {state}\n"
        for gpu, state in states.items()
    )
