"""The GPUs, which of them CUDA shows and in which order, and whether this torch can use them.

``python -m`` with this module's name prints as JSON what torch says of its GPUs. The doctor reads
that from a process of its own, because a broken driver may end the process that asks it.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from harness.doctor.report import Section
from harness.machine import choice, nvml
from harness.machine.nvml import Gpu
from harness.machine.visible import visible

PROBE = ["-m", __name__]
PROBE_SECONDS = 120
OTHER_TORCH = "Install a build for this GPU, as pytorch.org shows under Get started."


def gpus() -> tuple[Section, list[Gpu], list[Gpu]]:
    """The section, the GPUs of this machine, and those of ``CUDA_VISIBLE_DEVICES``."""
    value, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    variables = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order}
    section = Section("GPUs", "", {"there": [], **variables})
    try:
        there = nvml.gpus()
    except nvml.NoDriverError as error:
        section.text = f"none: {error}"
        if error.remedy:
            section.broken(str(error), error.remedy)
        return section, [], []
    shown, mistake = visible(there, value)
    if mistake:
        section.broken(
            f"CUDA_VISIBLE_DEVICES={value}: {mistake}",
            "Name GPUs by the numbers or the UUIDs that `nvidia-smi -L` shows.",
        )
    for gpu in there:
        is_used = value is None or gpu in shown
        if is_used and not gpu.uuids:  # others are busy, or kept from computing on purpose
            section.broken(
                f"GPU {gpu.number} does not answer: {gpu.problem}",
                "Restart the machine, or leave it out of CUDA_VISIBLE_DEVICES until then.",
            )
    section.values["there"] = [asdict(gpu) for gpu in there]
    section.text = f"{len(there)} here, {len(shown)} visible"
    if value is not None:
        section.text += f" with CUDA_VISIBLE_DEVICES={value or repr(value)}"
    if order is not None:
        section.text += f", CUDA_DEVICE_ORDER={order}"
    return section, there, choice.selectable(shown)


def torch_on_gpus(
    there: list[Gpu], shown: list[Gpu], probe: dict[str, Any] | None
) -> tuple[Section, dict[int, Gpu], list[int]]:
    """Whether this torch computes on each visible GPU.

    Args:
        there: the GPUs of this machine.
        shown: those that ``CUDA_VISIBLE_DEVICES`` names, in its order.
        probe: what ``ask_torch`` has returned.

    Returns:
        The section; the GPUs by CUDA's number, which may follow another order than NVML's; and
        the numbers of those on which torch computes.
    """
    by_index = dict(enumerate(shown))
    section = Section("torch on GPUs", "no answer", probe)
    working: list[int] = []
    if probe is None:
        section.broken(
            "torch does not answer: it cannot be imported, or waits for a GPU",
            f"Run `python {' '.join(PROBE)}`, and mend what it says.",
        )
        return section, by_index, working
    cuda = probe["cuda"]
    section.text = f"torch is built for CUDA {cuda}" if cuda else "torch is built for CPUs"
    if probe["mps"]:
        section.text = "torch uses Apple's GPU"
    elif not shown:
        section.text += "; no GPU is visible"
    elif cuda is None:
        section.broken("this torch is built for CPUs, and leaves the GPUs idle", OTHER_TORCH)
    elif not probe["devices"]:
        section.broken(
            f"torch cannot use CUDA: {probe['error'] or 'it finds no GPU'}",
            "Run `nvidia-smi`, and restart the machine if it fails as well; else update the driver "
            "or install a torch for the CUDA version that it shows.",
        )
    by_uuid = {uuid.removeprefix("GPU-"): gpu for gpu in (*there, *shown) for uuid in gpu.uuids}
    # CUDA may call a MIG device by another UUID: then its place in the order identifies it.
    found = {
        index: by_uuid.get(device["uuid"], by_index.get(index, shown[0]))
        for index, device in enumerate(probe["devices"] if shown else [])
    }
    for index, gpu in found.items():
        device = probe["devices"][index]
        if not device["error"]:
            working.append(index)
        elif "out of memory" in device["error"] or gpu.problem:
            section.text += f"; cuda:{index} is busy"
        else:
            section.broken(
                f"torch cannot compute on cuda:{index} ({device['name']}): {device['error']}",
                f"{OTHER_TORCH} Or leave the GPU out of CUDA_VISIBLE_DEVICES.",
            )
    if working:
        section.text += f"; computes on {', '.join(f'cuda:{index}' for index in working)}"
    return section, found or by_index, working


def ask_torch() -> dict[str, Any] | None:
    """The answer of ``probe`` in another process; ``None`` if it fails or does not end."""
    command = [sys.executable, *PROBE]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return None
    return answer


def probe() -> dict[str, Any]:
    """Torch's versions, and whether it can compute on each visible GPU."""
    import torch

    report: dict[str, Any] = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,  # None in a build for CPUs
        "mps": torch.backends.mps.is_available(),  # Apple's GPU
        "error": "",
        "devices": [],
    }
    if torch.version.cuda is None:
        return report
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        report["error"] = _first_line(error)
        return report
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device = {"name": properties.name, "uuid": str(properties.uuid), "error": ""}
        try:
            ones = torch.ones(64, 64, device=f"cuda:{index}")
            if (ones @ ones).sum().item() != 64**3:
                device["error"] = "a product of matrices comes out wrong"
        except RuntimeError as error:  # no code for this kind of GPU, or no memory left
            device["error"] = _first_line(error)
        report["devices"].append(device)
    return report


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0]


if __name__ == "__main__":
    print(json.dumps(probe()))
