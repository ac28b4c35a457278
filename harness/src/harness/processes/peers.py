"""Notice that another process of a run has ended, for which a collective would wait.

Every further process holds a connection to rank 0, which the system closes when a process ends,
however it ends. A process that knows that it ends says so with its rank and exit status, and rank 0
passes that on. In: the address of rank 0. Next: ``leaving.leave``.
"""

import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from harness.processes import leaving

log = logging.getLogger(__name__)

INTRODUCTION = struct.Struct("!16sI")  # a token against strangers, and the rank
NEWS = struct.Struct("!IB")  # whose end, and its exit status or:
AGREED, FAILED, KILLED = 0, 1, 255
# Processes that fail in the same way, as by a wrong setting, get this long to say why themselves.
GRACE_SECONDS = 2.0
# A process that fails because another one was killed gets this long to learn of it.
NEWS_SECONDS = 0.5
CONNECT_SECONDS = 30.0
# A host that is gone is noticed after 5 + 3 * 5 seconds without an answer.
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
connections: set[socket.socket] = set()  # of this process


class Peers:
    """Connections of rank 0 to all other processes, or of another one to rank 0.

    Args:
        rank: of this process.
        num_ranks: processes of the run.
        address: at which the others reach rank 0.
        broadcast: gives every process the value of rank 0; all of them call it.
        is_one_machine: whether all write to one screen, where a process that fails says why.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        address: str,
        broadcast: Callable[[Any], Any],
        is_one_machine: bool,
    ) -> None:
        self.rank, self.is_closing, self.is_one_machine = rank, False, is_one_machine
        self.connections: dict[int, socket.socket] = {}  # by the rank at the other end
        try:
            if rank == 0:
                self._accept(num_ranks, broadcast)
            else:
                port, token = broadcast(None)
                self.connections[0] = socket.create_connection((address, port), CONNECT_SECONDS)
                self.connections[0].sendall(INTRODUCTION.pack(token, rank))
        except OSError as error:  # a firewall between hosts
            log.warning(
                "Rank %d cannot watch the other processes (%s): the end of one may be noticed only "
                "by the time limit of collective operations.",
                rank,
                error,
            )
        connections.update(self.connections.values())
        leaving.farewells.add(self.say)
        self.first_news = threading.Lock()  # of two ends at once only one counts
        for end in self.connections.items():
            keep_alive(end[1])
            threading.Thread(target=self._watch, args=end, name="peers", daemon=True).start()

    def _accept(self, num_ranks: int, broadcast: Callable[[Any], Any]) -> None:
        with socket.create_server(("", 0), backlog=num_ranks) as server:
            server.settimeout(CONNECT_SECONDS)
            token = secrets.token_bytes(16)
            broadcast((server.getsockname()[1], token))
            while len(self.connections) < num_ranks - 1:
                connection = server.accept()[0]
                connection.settimeout(CONNECT_SECONDS)
                theirs, rank = receive(connection, INTRODUCTION) or (b"", 0)
                if theirs == token:
                    self.connections[rank] = connection
                else:
                    connection.close()  # a stranger

    def say(self, status: int, rank: int | None = None) -> None:
        """Tell the others that a process, by default this one, ends with an exit status."""
        rank = self.rank if rank is None else rank
        for other, connection in self.connections.items():
            if other != rank:
                with suppress(OSError):  # killed as well
                    connection.sendall(NEWS.pack(rank, min(status, KILLED)))

    def fail(self, is_logged: bool) -> None:
        """Say that an error ends this process, unless that is the end of another one.

        With ``is_logged`` the log has the reason already, so the others leave first: their
        collective operations would fail with a traceback of their own.
        """
        self.is_closing = is_logged
        self.say(FAILED)
        time.sleep(NEWS_SECONDS + GRACE_SECONDS if is_logged else NEWS_SECONDS)
        self.is_closing = True

    def close(self) -> None:
        """Leave as agreed."""
        self.is_closing = True
        leaving.farewells.discard(self.say)
        self.say(AGREED)
        for connection in self.connections.values():
            with suppress(OSError):  # the other end has left as well
                connection.shutdown(socket.SHUT_WR)
            connections.discard(connection)

    def _watch(self, other: int, connection: socket.socket) -> None:
        rank, status = receive(connection, NEWS) or (other, KILLED)
        if rank == 0 and status == FAILED:
            leaving.first_has_failed.set()
        with self.first_news:
            if status != AGREED and not self.is_closing:
                self._end(rank, status)

    def _end(self, rank: int, status: int) -> None:
        """Tell the others, and leave without the process that has ended."""
        if self.rank == 0:
            self.say(status, rank)
        if status not in (FAILED, KILLED):
            leaving.leave(status)
        if status == FAILED:
            time.sleep(GRACE_SECONDS)
        if self.is_closing:
            return
        log.log(
            logging.INFO if status == FAILED and self.is_one_machine else logging.ERROR,
            "The process of rank %d has %s; rank %d leaves, it cannot go on without it.\n"
            "The same command with resume=auto goes on from the last checkpoint.",
            rank,
            "failed" if status == FAILED else "ended",
            self.rank,
        )
        leaving.leave(128 + leaving.received if leaving.received else 1)


def receive(connection: socket.socket, message: struct.Struct) -> tuple[Any, ...] | None:
    """Return a message; ``None`` where the other end is gone before."""
    with suppress(OSError):
        data = connection.recv(message.size, socket.MSG_WAITALL)
        if len(data) == message.size:
            return message.unpack(data)
    return None


def keep_alive(connection: socket.socket) -> None:
    """Let the system ask whether the other host is still there."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        if hasattr(socket, option):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def close_inherited() -> None:
    """In a forked data worker, close the copies that would hide the end of its process."""
    for connection in connections:
        os.close(connection.detach())  # also where the parent's thread was reading it
    connections.clear()
