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
from harness.machine.nvml import Driver, Gpu
from harness.machine.visible import visible

PROBE = ["-m", __name__]
PROBE_SECONDS = 120


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


def driver() -> tuple[Section, Driver | None]:
    """The version of the driver, and of the newest CUDA that it runs."""
    try:
        found = nvml.driver()
    except nvml.NoDriverError:
        return Section("driver", "none"), None
    cuda = ".".join(map(str, found.cuda))
    values = {"version": found.version, "cuda": cuda}
    return Section("driver", f"{found.version}, for CUDA up to {cuda}", values), found


def torch_on_gpus(
    there: list[Gpu], shown: list[Gpu], driver: Driver | None, probe: dict[str, Any] | None
) -> tuple[Section, dict[int, Gpu], list[int]]:
    """Whether this torch fits the driver and computes on each visible GPU.

    Args:
        there: the GPUs of this machine.
        shown: those that ``CUDA_VISIBLE_DEVICES`` names, in its order.
        driver: of this machine.
        probe: what ``ask_torch`` has returned.

    Returns:
        The section; the GPUs by CUDA's number, which may follow another order than NVML's, see
        ``choice.is_order_unknown``; and the numbers of those on which torch computes.
    """
    by_index = dict(enumerate(shown))
    section = Section("torch on GPUs", "no answer", probe)
    if probe is None:
        section.broken(
            "torch does not answer: it cannot be imported, or waits for a GPU",
            f"Run `python {' '.join(PROBE)}`, and mend what it says.",
        )
        return section, by_index, []
    cuda = probe["cuda"]
    section.text = f"torch is built for CUDA {cuda}" if cuda else "torch is built for CPUs"
    if probe["mps"]:
        section.text = "torch uses Apple's GPU"
        return section, by_index, []
    if not shown:
        section.text += "; no GPU is visible"
        return section, by_index, []
    if cuda is None:
        section.broken(
            "this torch is built for CPUs, and leaves the GPUs idle",
            "Install a build for CUDA, as pytorch.org shows under Get started.",
        )
    elif probe["error"] or not probe["devices"]:
        remedy = "Run `nvidia-smi`; restart the machine if it fails as well."
        if driver is not None and int(cuda.split(".")[0]) > driver.cuda[0]:
            version = ".".join(map(str, driver.cuda))
            remedy = (
                f"Driver {driver.version} runs CUDA up to {version}: update it, or install a torch "
                f"for CUDA {driver.cuda[0]}, as pytorch.org shows under Get started."
            )
        section.broken(f"torch cannot use CUDA: {probe['error'] or 'it finds no GPU'}", remedy)
    by_uuid = {uuid.removeprefix("GPU-"): gpu for gpu in (*there, *shown) for uuid in gpu.uuids}
    if probe["devices"]:
        # CUDA may call a MIG device by another UUID: then its place in the order identifies it.
        uuids = [device["uuid"] for device in probe["devices"]]
        by_index = {i: by_uuid.get(uuid, by_index.get(i, shown[0])) for i, uuid in enumerate(uuids)}
    working = []
    for index, device in enumerate(probe["devices"]):
        if not device["error"]:
            working.append(index)
        elif "out of memory" in device["error"] or by_index[index].problem:
            section.text += f"; cuda:{index} is busy"
        else:
            section.broken(
                f"torch cannot compute on cuda:{index} ({device['name']}): {device['error']}",
                "Install a torch that is built for it, as pytorch.org shows under Get "
                "started, or leave it out of CUDA_VISIBLE_DEVICES.",
            )
    if working:
        section.text += f"; computes on {', '.join(f'cuda:{index}' for index in working)}"
    return section, by_index, working


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
