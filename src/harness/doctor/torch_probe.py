"""What torch says of its GPUs, as JSON: a process of its own, as a broken driver may end it.

python -m harness.doctor.torch_probe
"""

import json
from typing import Any

import torch


def probe() -> dict[str, Any]:
    """Torch's versions, and whether it can compute on each visible GPU."""
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
