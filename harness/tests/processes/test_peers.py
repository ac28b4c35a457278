"""The end of a process is heard, whatever the network does."""

import os
import queue
import socket
import threading
from typing import Any

import pytest

from harness.processes import leaving, peers
from harness.processes.peers import AGREED, FAILED, INTRODUCTION, KILLED, NEWS, Peers


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 0 of two, a plain socket at the other end, and what rank 0 hears."""
    heard: queue.Queue[tuple[int, int]] = queue.Queue()
    monkeypatch.setattr(Peers, "_end", lambda self, *news: heard.put(news))
    address: queue.Queue[tuple[int, bytes]] = queue.Queue()
    other = socket.socket()

    def introduce() -> None:
        port, token = address.get(timeout=300)
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        other.connect(("localhost", port))
        other.sendall(INTRODUCTION.pack(token, 1))

    threading.Thread(target=introduce).start()
    rank_0 = Peers(0, 2, "localhost", address.put, is_one_machine=True)
    yield rank_0, other, heard
    rank_0.close()
    other.close()
    for thread in threading.enumerate():
        if thread.name == "peers":
            thread.join(10)
    for connection in rank_0.connections.values():
        connection.close()


def test_end_is_heard_with_its_status(first: Any) -> None:
    _, other, heard = first
    other.sendall(NEWS.pack(1, FAILED))
    assert heard.get(timeout=300) == (1, FAILED)


def test_process_that_leaves_as_agreed_ends_nobody(first: Any) -> None:
    _, other, heard = first
    other.sendall(NEWS.pack(1, AGREED))
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.5)


def test_end_without_a_word_is_noticed(first: Any) -> None:
    _, other, heard = first
    other.close()
    assert heard.get(timeout=60) == (1, KILLED)


def test_forked_worker_keeps_no_connection_that_would_hide_the_end_of_its_process(
    first: Any,
) -> None:
    descriptor = first[0].connections[1].fileno()
    child = os.fork()
    if child == 0:
        peers.close_inherited()
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert os.fstat(descriptor)
    assert len(peers.connections) == 1


def test_process_that_leaves_at_once_says_so_before(first: Any) -> None:
    rank_0, other, _ = first
    (farewell,) = leaving.farewells
    farewell(143)
    assert peers.receive(other, NEWS) == (0, 143)
    rank_0.close()
    assert not leaving.farewells
