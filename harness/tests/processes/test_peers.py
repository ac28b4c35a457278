"""The end of a process is told in whole lines, however the network cuts them."""

import queue
import socket
import threading
import time
from typing import Any

import pytest

from harness.processes import leaving, peers
from harness.processes.peers import Peers


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 0 of two, a plain socket at the other end, and what rank 0 hears."""
    heard: queue.Queue[tuple[int, str]] = queue.Queue()
    monkeypatch.setattr(Peers, "_end", lambda self, *news: heard.put(news))

    def connect(*messages: bytes) -> tuple[Peers, socket.socket, queue.Queue[tuple[int, str]]]:
        address: queue.Queue[tuple[int, str]] = queue.Queue()
        other = socket.socket()

        def introduce() -> None:
            port, token = address.get(timeout=300)
            with socket.create_connection(("localhost", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            other.connect(("localhost", port))
            for message in messages:
                other.sendall(message.replace(b"TOKEN", token.encode()))
                time.sleep(0.05)

        threading.Thread(target=introduce).start()
        made.append(Peers(0, 2, "localhost", address.put))
        ends.append(other)
        return made[0], other, heard

    made: list[Peers] = []
    ends: list[socket.socket] = []
    yield connect
    made[0].close()
    ends[0].close()
    for thread in threading.enumerate():
        if thread.name == "peers":
            thread.join(10)
    for connection in made[0].connections.values():
        connection.close()


def test_message_in_pieces_is_one_message(first: Any) -> None:
    _, other, heard = first(b"TOKEN", b" 1", b"\n")
    for piece in (b"1 fai", b"led", b"\n"):
        other.sendall(piece)
        time.sleep(0.05)
    assert heard.get(timeout=300) == (1, "failed")
    other.close()


def test_goodbye_that_comes_with_the_introduction_is_heard(first: Any) -> None:
    _, other, heard = first(b"TOKEN 1\nbye\n")
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.5)


def test_end_without_a_word_is_noticed(first: Any) -> None:
    _, other, heard = first(b"TOKEN 1\n")
    other.close()
    assert heard.get(timeout=300) == (1, "has ended")


def test_who_leaves_at_once_says_so_before(first: Any) -> None:
    rank_0, other, _ = first(b"TOKEN 1\n")
    assert rank_0.part in leaving.FAREWELLS
    rank_0.part(143)
    assert peers.read_line(other) == "0 left 143"
    rank_0.close()
    assert not leaving.FAREWELLS
