import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from harness.processes import leaving

log = logging.getLogger(__name__)

# Processes that fail in the same way, as by a wrong setting, get this long to tell it themselves.
GRACE_SECONDS = 2.0
# And a process that fails because another is dead gets this long to learn of it.
NEWS_SECONDS = 0.5
CONNECT_SECONDS = 30.0
STOPS = "stops the run"
# A host that is gone is noticed after 5 + 3 * 5 seconds without an answer.
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# Sockets that a data worker inherits would hide the end of its process.
OPEN: set[socket.socket] = set()


class Peers:
    """Notice the end of another process of the run, which a collective operation would wait for.

    Every process holds a connection to the first one. The system closes it when a process ends,
    however it ends; who leaves as agreed says so before. The first process tells the others.

    Args:
        rank: of this process.
        num_ranks: processes of the run.
        address: where the others reach the first process.
        broadcast: gives every process the first one's value; all of them call it.
    """

    def __init__(
        self, rank: int, num_ranks: int, address: str, broadcast: Callable[[Any], Any]
    ) -> None:
        self.rank, self.is_closing, self.is_one_machine = rank, False, True
        self.connections: dict[int, socket.socket] = {}  # by the rank at the other end
        try:
            if rank == 0:
                self._accept(num_ranks, broadcast)
            else:
                self._connect(address, *broadcast(None))
            ends = [(c.getsockname()[0], c.getpeername()[0]) for c in self.connections.values()]
            self.is_one_machine = all(here == there for here, there in ends)
        except OSError as error:  # a firewall between hosts, or a name that leads elsewhere
            log.warning(
                "Rank %d cannot watch the other processes (%s): the end of one may be noticed only "
                "by the time limit of collective operations.",
                rank,
                error,
            )
        OPEN.update(self.connections.values())
        leaving.FAREWELLS.add(self.part)
        self.first_news = threading.Lock()  # of two ends at once only one counts
        for end in self.connections.items():
            keep_alive(end[1])
            threading.Thread(target=self._watch, args=end, name="peers", daemon=True).start()

    def _accept(self, num_ranks: int, broadcast: Callable[[Any], Any]) -> None:
        with socket.create_server(("", 0), backlog=num_ranks) as server:
            server.settimeout(CONNECT_SECONDS)
            token = secrets.token_hex(8)
            broadcast((server.getsockname()[1], token))
            while len(self.connections) < num_ranks - 1:
                connection = server.accept()[0]
                connection.settimeout(CONNECT_SECONDS)
                introduction = read_line(connection).split()
                connection.settimeout(None)
                if introduction[:1] == [token]:
                    self.connections[int(introduction[1])] = connection
                else:
                    connection.close()  # a stranger

    def _connect(self, address: str, port: int, token: str) -> None:
        connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        connection.settimeout(None)
        connection.sendall(f"{token} {self.rank}\n".encode())
        self.connections[0] = connection

    def close(self) -> None:
        """Say goodbye: this process leaves as agreed."""
        self.is_closing = True
        leaving.FAREWELLS.discard(self.part)
        self._tell("bye")
        for connection in self.connections.values():
            with suppress(OSError):  # the other end has left as well
                connection.shutdown(socket.SHUT_WR)
            OPEN.discard(connection)

    def fail(self, is_told: bool = False) -> None:
        """Say that an error ends this process, unless it is another one's end.

        With ``is_told`` the log says why the run stops: the others leave first, and say nothing.
        """
        self.is_closing = is_told
        self._tell(f"{self.rank} {STOPS if is_told else 'failed'}")
        time.sleep(GRACE_SECONDS + NEWS_SECONDS if is_told else NEWS_SECONDS)
        self.is_closing = True

    def part(self, status: int) -> None:
        """Say that this process leaves at once, because it was asked to."""
        self._tell(f"{self.rank} left {status}")

    def _tell(self, message: str, but: int | None = None) -> None:
        for rank, connection in self.connections.items():
            if rank != but:
                with suppress(OSError):  # dead as well
                    connection.sendall(f"{message}\n".encode())

    def _watch(self, rank: int, connection: socket.socket) -> None:
        """Wait for the first word from another process, or its end."""
        news = read_line(connection) or f"{rank} has ended"
        if news == "0 failed":
            leaving.first_has_failed.set()
        with self.first_news:
            if news != "bye" and not self.is_closing:
                who, _, what = news.partition(" ")
                self._end(int(who), what)

    def _end(self, rank: int, what: str) -> None:
        """Tell the others, and leave without the one that has ended."""
        if self.rank == 0:
            self._tell(f"{rank} {what}", but=rank)
        if what.startswith("left "):
            leaving.leave(int(what.split()[1]))
        if what in ("failed", STOPS):
            time.sleep(GRACE_SECONDS)
        if not self.is_closing:
            if what != STOPS:
                # On one machine the process that fails tells why, on the same screen.
                is_told = what == "failed" and self.is_one_machine
                log.log(
                    logging.INFO if is_told else logging.ERROR,
                    "The process of rank %d %s; rank %d leaves, it cannot go on without it.\n"
                    "The same command with resume=auto goes on from the last checkpoint.",
                    rank,
                    what,
                    self.rank,
                )
            leaving.leave(128 + leaving.received if leaving.received else 1)


def read_line(connection: socket.socket) -> str:
    """The first line that arrives, and nothing of what follows it; empty if none does."""
    line = b""
    with suppress(OSError), connection.makefile("rb", buffering=0) as file:
        line = file.readline(64)
    return line.decode(errors="replace").strip() if line.endswith(b"\n") else ""


def keep_alive(connection: socket.socket) -> None:
    """Let the system ask whether the other host is still there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        if hasattr(socket, option):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def close_inherited() -> None:
    """Close what a forked data worker has got from its process."""
    for connection in OPEN:
        os.close(connection.detach())  # also where the thread that reads it was in the middle
    OPEN.clear()
