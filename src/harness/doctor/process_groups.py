"""Whether processes can add up gradients: by starting two that do it, within a time limit."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack

from harness.doctor.section import Problem, Section

LIMIT_SECONDS = 60.0
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def gloo() -> Section:
    """Two processes on CPUs."""
    error = add_up("gloo", ["cpu", "cpu"])
    if not error:
        return Section("gloo", "works: all-reduce of 2 processes", {"works": True})
    remedy = "Processes of one machine cannot reach each other: look at its firewall and hosts file"
    if not add_up("gloo", ["cpu", "cpu"], {"GLOO_SOCKET_IFNAME": LOOPBACK}):
        remedy = f"It works with GLOO_SOCKET_IFNAME={LOOPBACK}: set that"
    remedy += ", or use strategy=auto or strategy=dp, which are one process."
    return _broken("gloo", error, remedy)


def nccl(devices: Sequence[str]) -> Section:
    """Two processes on GPUs, or one where there is one.

    Args:
        devices: those on which torch computes, such as ``cuda:0``.
    """
    if not devices:
        return Section("nccl", "not tested: it needs a GPU", {"works": None})
    used = devices[:2]
    error = add_up("nccl", used)
    if not error and len(used) == 2:
        return Section("nccl", f"works: all-reduce of {' and '.join(used)}", {"works": True})
    if not error:
        text = "works with one process; two need a second GPU"
        return Section("nccl", text, {"works": True})
    remedy = "Run it with NCCL_DEBUG=INFO to see more"
    if len(used) == 2 and not add_up("nccl", used, {"NCCL_P2P_DISABLE": "1"}):
        remedy = "It works with NCCL_P2P_DISABLE=1: set that, or repair peer-to-peer (IOMMU, ACS)"
    return _broken("nccl", error, f"{remedy}, or use trainer.devices=1.")


def _broken(backend: str, error: str, remedy: str) -> Section:
    what = f"{backend} does not work: {error}"
    return Section(
        backend, "does not work", {"works": False, "error": error}, [Problem(what, remedy)]
    )


def add_up(backend: str, devices: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Start one process per device; return what went wrong, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"WORLD_SIZE": str(len(devices)), **(environment or {})}
    with ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in devices]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "harness.doctor.all_reduce", backend, device],
                env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=said[rank],
                stderr=said[rank],
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
            for code, file in zip(codes, said, strict=True):
                if code:
                    file.seek(0)
                    lines = [line.strip() for line in file if line.strip()]
                    return lines[-1] if lines else f"a process has ended with status {code}"
            time.sleep(0.05)
    return f"no sum after {LIMIT_SECONDS:.0f} seconds"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
