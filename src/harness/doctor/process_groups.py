r"""Whether processes can sum gradients: by starting two that sum a tensor, within a time limit.

One process of the test, which ``python -m`` with this module's name starts:

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
        python -m <this module> <gloo or nccl> <cpu or cuda:0>
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack

from harness.doctor.report import Section

LIMIT_SECONDS = 60.0
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def gloo() -> Section:
    """Two processes on CPUs."""
    error = all_reduce_in_processes("gloo", ["cpu", "cpu"])
    if not error:
        return Section("gloo", "works: all-reduce of 2 processes", {"works": True})
    remedy = "Processes of one machine cannot reach each other: look at its firewall and hosts file"
    if not all_reduce_in_processes("gloo", ["cpu", "cpu"], {"GLOO_SOCKET_IFNAME": LOOPBACK}):
        remedy = f"It works with GLOO_SOCKET_IFNAME={LOOPBACK}: set that"
    return _broken(
        "gloo", error, f"{remedy}, or use strategy=auto or strategy=dp, which are one process."
    )


def nccl(devices: Sequence[str]) -> Section:
    """Two processes on GPUs, or one where there is one.

    Args:
        devices: those on which torch computes, such as ``cuda:0``.
    """
    if not devices:
        return Section("nccl", "not tested: it needs a GPU", {"works": None})
    used = devices[:2]
    error = all_reduce_in_processes("nccl", used)
    if not error:
        both = f"works: all-reduce of {' and '.join(used)}"
        text = both if len(used) == 2 else "works with one process; two need a second GPU"
        return Section("nccl", text, {"works": True})
    remedy = "Run it with NCCL_DEBUG=INFO to see more"
    if len(used) == 2 and not all_reduce_in_processes("nccl", used, {"NCCL_P2P_DISABLE": "1"}):
        remedy = "It works with NCCL_P2P_DISABLE=1: set that, or repair peer-to-peer (IOMMU, ACS)"
    return _broken("nccl", error, f"{remedy}, or use trainer.devices=1.")


def _broken(backend: str, error: str, remedy: str) -> Section:
    section = Section(backend, "does not work", {"works": False, "error": error})
    return section.broken(f"{backend} does not work: {error}", remedy)


def all_reduce_in_processes(
    backend: str, devices: Sequence[str], environment: dict[str, str] | None = None
) -> str:
    """Start one process per device; return what went wrong, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"WORLD_SIZE": str(len(devices)), **(environment or {})}
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in devices]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, backend, device],
                env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=outputs[rank],
                stderr=outputs[rank],
            )
            for rank, device in enumerate(devices)
        ]
        for process in processes:
            stack.callback(_end, process)
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if codes == [0] * len(codes):
                return ""
            # The others would wait for the one that has failed.
            for code, file in zip(codes, outputs, strict=True):
                if code:
                    file.seek(0)
                    lines = [line.strip() for line in file if line.strip()]
                    return lines[-1] if lines else f"a process has ended with status {code}"
            time.sleep(0.05)
    return f"no sum after {LIMIT_SECONDS:.0f} seconds"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def all_reduce(backend: str, name: str) -> None:
    """Sum a tensor over all processes, and compare the sum with the right one."""
    import torch
    from torch import distributed

    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend)
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    summed = torch.full((2**20,), rank + 1.0, device=device)
    distributed.all_reduce(summed)
    right = num_ranks * (num_ranks + 1) / 2
    if not torch.equal(summed, torch.full_like(summed, right)):
        sys.exit(f"The sum is {summed.min():g} to {summed.max():g}, and should be {right:g}.")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    all_reduce(*sys.argv[1:])
