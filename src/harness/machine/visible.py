"""Which GPUs ``CUDA_VISIBLE_DEVICES`` shows, read as CUDA and torch read it."""

import os
import platform
import re
from collections.abc import Sequence

from harness.machine import nvml
from harness.machine.nvml import Gpu


def num_gpus() -> int:
    """GPUs that this process may use: the visible CUDA devices, or Apple's one."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return 1
    try:
        shown, _ = visible(nvml.gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NoDriverError:
        return 0
    num_whole = sum(not gpu.is_mig and not gpu.mig_devices for gpu in shown)
    return num_whole or min(len(shown), 1)  # CUDA shows one MIG device to a process


def visible(gpus: Sequence[Gpu], value: str | None) -> tuple[list[Gpu], str]:
    """The GPUs that CUDA shows, its first device first.

    Args:
        gpus: of the machine.
        value: of ``CUDA_VISIBLE_DEVICES``; ``None`` if it is not set.

    Returns:
        The GPUs, and what is wrong with the value; the second is empty if nothing is.
    """
    if value is None:
        return list(gpus), ""
    if value.strip() in ("", "-1"):  # how to hide all
        return [], ""
    kind = value[:4] if value.startswith(("GPU-", "MIG-")) else ""
    known = [device for gpu in gpus for device in gpu.mig_devices] if kind == "MIG-" else gpus
    names: list[str] = []
    shown: list[Gpu] = []
    mistake = ""
    for entry in value.split(","):
        if kind:
            name = entry if entry.startswith(kind) else ""
        else:  # CUDA reads "2x" as 2
            number = re.match(r"\s*\+?(\d+)", entry)
            name = str(int(number[1])) if number else ""
        found = [gpu for gpu in known if _is_called(gpu, name)]
        if not mistake and len(found) != 1:
            mistake = f"{entry.strip()!r} names no GPU, and CUDA ignores it and what follows"
        if name in names or (not mistake and found[0] in shown):
            return [], f"{entry.strip()!r} is in it twice, and CUDA then shows no GPU"
        if not name:
            break
        names.append(name)
        if not mistake:
            shown.extend(found)
    return shown, mistake


def _is_called(gpu: Gpu, name: str) -> bool:
    """Whether ``name`` is its number, or the first characters of its UUID."""
    is_uuid = name.startswith(("GPU-", "MIG-"))
    return gpu.number == name or (is_uuid and any(uuid.startswith(name) for uuid in gpu.uuids))
