"""The GPUs, which of them CUDA shows and in which order, and whether this torch can use them."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from harness.doctor.section import Problem, Section
from harness.machine import choice, nvml
from harness.machine.nvml import Driver, Gpu
from harness.machine.visible import visible

PROBE_SECONDS = 120


def gpus() -> tuple[Section, list[Gpu], list[Gpu]]:
    """What there is to say, the GPUs of this machine, and those of ``CUDA_VISIBLE_DEVICES``."""
    value, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    values: dict[str, Any] = {
        "there": [],
        "CUDA_VISIBLE_DEVICES": value,
        "CUDA_DEVICE_ORDER": order,
    }
    section = Section("GPUs", "", values)
    try:
        there = nvml.gpus()
    except nvml.NoDriverError as error:
        section.text = f"none: {error}"
        if error.remedy:
            section.problems.append(Problem(str(error), error.remedy))
        return section, [], []
    shown, mistake = visible(there, value)
    if mistake:
        section.problems.append(
            Problem(
                f"CUDA_VISIBLE_DEVICES={value}: {mistake}",
                "Name GPUs by the numbers or the UUIDs that `nvidia-smi -L` shows.",
            )
        )
    for gpu in there:
        is_used = value is None or gpu in shown
        if is_used and not gpu.uuids:  # others are busy, or kept from computing on purpose
            section.problems.append(
                Problem(
                    f"GPU {gpu.number} does not answer: {gpu.problem}",
                    "Restart the machine, or leave it out of CUDA_VISIBLE_DEVICES until then.",
                )
            )
    values["there"] = [asdict(gpu) for gpu in there]
    section.text = f"{len(there)} here, {len(shown)} visible"
    if value is not None:
        section.text += f" with CUDA_VISIBLE_DEVICES={value or repr(value)}"
    if order is not None:
        section.text += f", CUDA_DEVICE_ORDER={order}"
    # CUDA shows the parts of a GPU in its place.
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
        probe: the answer of torch_probe.py; ``None`` if it had none.

    Returns:
        What was seen; the GPUs by CUDA's number, which may follow another order than NVML's, see
        ``choice.is_order_unknown``; and the numbers of those that compute.
    """
    places = dict(enumerate(shown))
    if probe is None:
        what = "torch does not answer: it cannot be imported, or waits for a GPU"
        remedy = "Run `python -m harness.doctor.torch_probe`, and mend what it says."
        return Section("torch on GPUs", "no answer", None, [Problem(what, remedy)]), places, []
    cuda, errors = probe["cuda"], list[Problem]()
    text = f"torch is built for CUDA {cuda}" if cuda else "torch is built for CPUs"
    if probe["mps"]:
        return Section("torch on GPUs", "torch uses Apple's GPU", probe), places, []
    if not shown:
        return Section("torch on GPUs", f"{text}; no GPU is visible", probe), places, []
    if cuda is None:
        errors.append(
            Problem(
                "this torch is built for CPUs, and leaves the GPUs idle",
                "Install a build for CUDA, as pytorch.org shows under Get started.",
            )
        )
    elif probe["error"] or not probe["devices"]:
        what = f"torch cannot use CUDA: {probe['error'] or 'it finds no GPU'}"
        remedy = "Run `nvidia-smi`; restart the machine if it fails as well."
        if driver is not None and int(cuda.split(".")[0]) > driver.cuda[0]:
            version = ".".join(map(str, driver.cuda))
            remedy = (
                f"Driver {driver.version} runs CUDA up to {version}: update it, or install a torch "
                f"for CUDA {driver.cuda[0]}, as pytorch.org shows under Get started."
            )
        errors.append(Problem(what, remedy))
    by_uuid = {uuid.removeprefix("GPU-"): gpu for gpu in (*there, *shown) for uuid in gpu.uuids}
    if probe["devices"]:
        # A MIG part may have another UUID in CUDA: its place tells which it is.
        names = [device["uuid"] for device in probe["devices"]]
        places = {i: by_uuid.get(name, places.get(i, shown[0])) for i, name in enumerate(names)}
    working = []
    for index, device in enumerate(probe["devices"]):
        if not device["error"]:
            working.append(index)
        elif "out of memory" in device["error"] or places[index].problem:
            text += f"; cuda:{index} is busy"
        else:
            errors.append(
                Problem(
                    f"torch cannot compute on cuda:{index} ({device['name']}): {device['error']}",
                    "Install a torch that is built for it, as pytorch.org shows under Get "
                    "started, or leave it out of CUDA_VISIBLE_DEVICES.",
                )
            )
    if working:
        text += f"; computes on {', '.join(f'cuda:{index}' for index in working)}"
    return Section("torch on GPUs", text, probe, errors), places, working


def ask_torch() -> dict[str, Any] | None:
    """Run torch_probe.py; ``None`` if it fails or does not come to an end."""
    command = [sys.executable, "-m", "harness.doctor.torch_probe"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return None
    return answer
