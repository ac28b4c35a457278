"""Whether processes can sum gradients: by starting some that sum a tensor, within a time limit."""

import os
import sys
import tempfile
from collections.abc import Sequence

from harness.doctor.processes import in_processes, message
from harness.doctor.report import Section

LIMIT_SECONDS = 60.0
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def gloo() -> Section:
    """Two processes on CPUs."""
    return _tried(
        "gloo",
        ["cpu", "cpu"],
        {"GLOO_SOCKET_IFNAME": LOOPBACK},
        "Processes of one machine cannot reach each other: look at its firewall and hosts file, "
        "or use strategy=auto or strategy=dp, which are one process.",
    )


def nccl(devices: Sequence[str]) -> Section:
    """Two processes on GPUs such as ``cuda:0``, or one where there is one."""
    if not devices:
        return Section("nccl", "not tested: it needs a GPU", {"works": None})
    return _tried(
        "nccl",
        devices[:2],
        {"NCCL_P2P_DISABLE": "1"},
        "Run it with NCCL_DEBUG=INFO to see more, or use trainer.devices=1.",
    )


def _tried(
    backend: str, devices: Sequence[str], workaround: dict[str, str], remedy: str
) -> Section:
    error = all_reduce_in_processes(backend, devices)
    if not error:
        return Section(backend, f"works: all-reduce of {' and '.join(devices)}", {"works": True})
    if not all_reduce_in_processes(backend, devices, workaround):
        setting = " ".join(f"{name}={value}" for name, value in workaround.items())
        remedy = f"It works with {setting}: set that."
    section = Section(backend, "does not work", {"works": False, "error": error})
    return section.broken(f"{backend} does not work: {error}", remedy)


def all_reduce_in_processes(
    backend: str, devices: Sequence[str], environment: dict[str, str] | None = None
) -> str:
    """Start one process per device; return what went wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            (backend, device, rank, len(devices), folder, environment or {})
            for rank, device in enumerate(devices)
        ]
        try:
            in_processes(all_reduce, jobs, LIMIT_SECONDS)
        except Exception as error:  # of whichever kind torch raises
            return message(error)
    return ""


def all_reduce(
    backend: str, name: str, rank: int, num_ranks: int, folder: str, environment: dict[str, str]
) -> None:
    """Sum a tensor over all processes, which meet in a folder, and check the sum."""
    os.environ.update({"TORCH_CPP_LOG_LEVEL": "ERROR"} | environment)
    import torch
    from torch import distributed

    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, f"file://{folder}/meeting", rank=rank, world_size=num_ranks
    )
    summed = torch.full((2**20,), rank + 1.0, device=device)
    distributed.all_reduce(summed)
    right = num_ranks * (num_ranks + 1) / 2
    if not torch.equal(summed, torch.full_like(summed, right)):
        raise RuntimeError(
            f"The sum is {summed.min():g} to {summed.max():g}, and should be {right:g}."
        )
    distributed.barrier()
    distributed.destroy_process_group()
