"""Which devices there are, found without importing torch."""

import os
import platform


def num_gpus() -> int:
    """GPUs that this process may use: CUDA devices in ``CUDA_VISIBLE_DEVICES``, or Apple's one."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_physical = num_nvidia_gpus()
    if visible is None:
        return num_physical
    # CUDA stops at the first name that it does not know.
    count = 0
    for name in (part.strip() for part in visible.split(",")):
        known = int(name) < num_physical if name.isdigit() else name.startswith(("GPU-", "MIG-"))
        if not known or (count == num_physical and not name.startswith("MIG-")):
            break
        count += 1
    return count


def num_nvidia_gpus() -> int:
    """Physical NVIDIA GPUs of this machine; 0 where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
