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

    Args:
        all_: by rank: a machine's name, its ``network()``, and more.

    Raises:
        UserError: with what to set there.
    """
    if len({stack for _, (stack, _), *_ in all_.values()}) == 1:
        return  # all are on one machine
    for rank, (host, (_, is_hidden), *_) in all_.items():
        if is_hidden:
            raise UserError(
                f"Rank {rank} on {host} cannot be reached: its machine's name leads to itself "
                f"alone.\nSet GLOO_SOCKET_IFNAME=<its network interface> there, or give {host} its "
                "address in /etc/hosts."
            )


def network() -> tuple[str, bool]:
    """Name this process's network, and say whether gloo would hide this machine from others."""
    stack = socket.gethostname()
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stack = boot + os.readlink("/proc/self/ns/net")
    return stack, "GLOO_SOCKET_IFNAME" not in os.environ and _is_loopback(socket.gethostname())


def _is_loopback(host: str) -> bool:
    """Whether a name leads a machine to itself, or nowhere."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0]).startswith(("127.", "::1"))
    except OSError:
        return True
