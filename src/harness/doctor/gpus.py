"""The GPUs, which of them CUDA shows and in which order, and whether this torch can use them."""

import os
from dataclasses import asdict
from typing import Any

from harness.doctor.processes import in_processes, message
from harness.doctor.report import Section
from harness.machine import choice, nvml
from harness.machine.nvml import Gpu
from harness.machine.visible import visible

PROBE_SECONDS = 60.0
OTHER_TORCH = "Install a build for this GPU, as pytorch.org shows under Get started."


def gpus() -> tuple[Section, list[Gpu], list[Gpu]]:
    """The section, the GPUs of this machine, and those of ``CUDA_VISIBLE_DEVICES``."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    section = Section("GPUs", "", {"there": [], "CUDA_VISIBLE_DEVICES": value})
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
    return section, there, choice.selectable(shown)


def torch_on_gpus(
    there: list[Gpu], shown: list[Gpu], probe: dict[str, Any]
) -> tuple[Section, dict[int, Gpu], list[int]]:
    """Whether torch, which ``probe`` tells of, computes on each GPU that is shown.

    Returns:
        The section; the GPUs by CUDA's number, which may follow another order than NVML's; and
        the numbers of those on which torch computes.
    """
    by_index = dict(enumerate(shown))
    cuda = probe["cuda"]
    text = f"torch is built for CUDA {cuda}" if cuda else "torch is built for CPUs"
    section = Section("torch on GPUs", text, probe)
    working: list[int] = []
    if cuda is None and probe["error"]:
        section.text = "no answer"
        section.broken(
            f"torch does not answer: {probe['error']}",
            "Run `python -c 'import torch; torch.cuda.init()'`, and mend what it says.",
        )
    elif probe["mps"]:
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


def ask_torch() -> dict[str, Any]:
    """The answer of ``probe``, or an ``error`` where torch does not answer.

    It is asked in a process of its own, because a broken driver may end the one that asks it.
    """
    try:
        (answer,) = in_processes(probe, [()], PROBE_SECONDS)
    except Exception as error:  # torch may raise anything, also while it is imported
        return {"cuda": None, "mps": False, "devices": [], "error": message(error)}
    return dict(answer)


def probe() -> dict[str, Any]:
    """Torch's versions, and whether it can compute on each visible GPU."""
    import torch

    report: dict[str, Any] = {
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
        report["error"] = message(error)
        return report
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device = {"name": properties.name, "uuid": str(properties.uuid), "error": ""}
        try:
            ones = torch.ones(64, 64, device=f"cuda:{index}")
            if (ones @ ones).sum().item() != 64**3:
                device["error"] = "a product of matrices comes out wrong"
        except RuntimeError as error:  # no code for this kind of GPU, or no memory left
            device["error"] = message(error)
        report["devices"].append(device)
    return report
