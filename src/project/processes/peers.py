import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from project.processes import leaving

log = logging.getLogger(__name__)

# Processes that fail in the same way, as by a wrong setting, get this long to tell it themselves.
GRACE_SECONDS = 2.0
# And a process that fails because another is dead gets this long to learn of it.
NEWS_SECONDS = 0.5
CONNECT_SECONDS = 30.0
STOPS = "stops the run"
# A host that is gone is noticed after 5 + 3 * 5 seconds without an answer.
IDLE_SECONDS, PROBE_SECONDS, NUM_PROBES = 5, 5, 3
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
        self.rank, self.is_closing = rank, False
        self.connections: dict[int, socket.socket] = {}  # by the rank at the other end
        try:
            if rank == 0:
                self._accept(num_ranks, broadcast)
            else:
                self._connect(address, *broadcast(None))
        except OSError as error:  # a firewall between hosts, or a name that leads elsewhere
            log.warning(
                "Rank %d cannot watch the other processes (%s): the end of one may be noticed only "
                "by the time limit of collective operations.",
                rank,
                error,
            )
        for connection in self.connections.values():
            keep_alive(connection)
        OPEN.update(self.connections.values())
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def _accept(self, num_ranks: int, broadcast: Callable[[Any], Any]) -> None:
        with socket.create_server(("", 0), backlog=num_ranks) as server:
            server.settimeout(CONNECT_SECONDS)
            token = secrets.token_hex(8)
            broadcast((server.getsockname()[1], token))
            while len(self.connections) < num_ranks - 1:
                connection = server.accept()[0]
                connection.settimeout(CONNECT_SECONDS)
                introduction = connection.makefile().readline().split()
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
        for connection in self.connections.values():
            with suppress(OSError):  # the other end has left as well
                connection.sendall(b"bye")
                connection.shutdown(socket.SHUT_WR)
            OPEN.discard(connection)

    def fail(self, is_told: bool = False) -> None:
        """Say that an error ends this process, unless it is another one's end.

        With ``is_told`` the log says why the run stops: the others leave first, and say nothing.
        """
        self.is_closing = is_told
        for connection in self.connections.values():
            with suppress(OSError):
                connection.sendall(f"{self.rank} {STOPS if is_told else 'failed'}".encode())
        time.sleep(GRACE_SECONDS + NEWS_SECONDS if is_told else NEWS_SECONDS)
        self.is_closing = True

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for rank, connection in self.connections.items():
            selector.register(connection, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                end: Any = key.fileobj
                try:
                    message = end.recv(64).decode()
                except OSError:  # no answer from its host
                    message = ""
                if message == "bye":
                    selector.unregister(end)
                elif self.is_closing:
                    return
                else:
                    who, _, what = (message or f"{key.data} has ended").partition(" ")
                    self._end(int(who), what)

    def _end(self, dead_rank: int, what: str) -> None:
        """Tell the others, and leave without the dead."""
        for rank, connection in self.connections.items():
            if self.rank == 0 and rank != dead_rank:
                with suppress(OSError):  # dead as well
                    connection.sendall(f"{dead_rank} {what}".encode())
        if what in ("failed", STOPS):
            time.sleep(GRACE_SECONDS)
        if not self.is_closing:
            if what != STOPS:
                log.error(
                    "The process of rank %d %s; rank %d leaves, it cannot go on without it.\n"
                    "resume=auto goes on from the last checkpoint.",
                    dead_rank,
                    what,
                    self.rank,
                )
            leaving.leave(128 + leaving.received if leaving.received else 1)


def keep_alive(connection: socket.socket) -> None:
    """Let the system ask whether the other host is still there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", IDLE_SECONDS),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", NUM_PROBES),
    ):
        if hasattr(socket, option):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def close_inherited() -> None:
    """Close what a forked data worker has got from its process."""
    for connection in OPEN:
        connection.close()
    OPEN.clear()
