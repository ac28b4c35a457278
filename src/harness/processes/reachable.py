"""Whether machines can reach each other by the names that they have. No torch."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.errors import UserError


def check_names(all_: Mapping[int, Any]) -> None:
    """Refuse a machine that tells others to reach it where only itself is, as Debian's names do.

    Raises:
        UserError: with what to set there.
    """
    if len({network["stack"] for _, network, *_ in all_.values()}) == 1:
        return  # all are on one machine
    for rank, (host, network, *_) in all_.items():
        if network["is_hidden"]:
            raise UserError(
                f"Rank {rank} on {host} cannot be reached: its machine's name leads to itself "
                f"alone.\nSet GLOO_SOCKET_IFNAME={network['interface'] or '<interface>'} there, or "
                f"give {host} its address in /etc/hosts."
            )


def network() -> dict[str, Any]:
    """Which network this process is in, and whether gloo would tell others how to reach it."""
    stack = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stack = boot + os.readlink("/proc/self/ns/net")
    is_hidden = "GLOO_SOCKET_IFNAME" not in os.environ and is_loopback(socket.gethostname())
    return {
        "stack": stack or socket.gethostname(),
        "is_hidden": is_hidden,
        "interface": _interface(),
    }


def is_loopback(host: str) -> bool:
    """Whether a name leads a machine to itself, or nowhere."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0]).startswith(("127.", "::1"))
    except OSError:
        return True


def _interface() -> str:
    """The name of a network interface that is not the machine's own loop."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    return names[0] if len(names) == 1 else ""
