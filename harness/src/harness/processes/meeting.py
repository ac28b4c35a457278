"""Where the processes of a launcher meet before they train: they compare, and the first decides."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.processes import leaving
from harness.processes.launcher import Launcher
from harness.processes.messages import POLL_SECONDS, Messages
from harness.processes.reachable import check_names, network

SEE_SECONDS = 20.0  # after which a network disk shows to all machines what one has written
WATCH_SECONDS = 1.0
NUM_SHOWN = 6  # differences of a process


class Meeting:
    """Agreement of the processes that were started as one run; one alone agrees at once.

    Args:
        known: what the launcher has told.
        minutes: how long to wait for another one, at any moment.

    Raises:
        UserError: if the place of rank 0 is not known, or nobody answers there.
    """

    def __init__(self, known: Launcher, minutes: float) -> None:
        self.known = known
        self.is_alone = not known.is_one_of_several
        if self.is_alone:
            return
        leaving.connected.clear()  # set by a run before, in this process
        self.messages = Messages(known, minutes * 60)

    def compare(self, mine: Mapping[str, Mapping[str, Any]]) -> None:
        """Stop the run where a process would do something else than the first one.

        Args:
            mine: what counts, by kind and name, as plain values.

        Raises:
            UserError: with each rank, its machine, and what differs.
        """
        about = [socket.gethostname(), network(), mine]
        self.messages.set(f"about/{self.known.rank}", about)
        if self.known.rank > 0:
            self.messages.hear("compared")
            return
        ranks = range(self.known.num_processes)
        all_ = {rank: self.messages.hear(f"about/{rank}") for rank in ranks}
        check_names(all_)
        host, _, first = all_[0]
        told = [
            f"Rank {rank} on {there} has {'; '.join(found)} (rank 0 on {host}).\n"
            for rank, (there, _, theirs) in all_.items()
            if (found := differences(first, theirs))
        ]
        if told:
            raise UserError(
                f"{''.join(told[:NUM_SHOWN])}All processes of a run need the same code, packages "
                "and settings. A setting that may differ between machines\nbelongs to may_differ "
                "in conf/rules.yaml."
            )
        self.messages.tell("compared", True)

    def decided(self, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the first process decides; it tells the others, as plain values."""
        if self.is_alone:
            return decide()
        if self.known.rank == 0:
            self.messages.tell("decided", decide())
        found: dict[str, Any] = self.messages.hear("decided")
        return found

    def see(self, folder: Path) -> None:
        """Find out whether all processes see the files that the first one has in a folder.

        Raises:
            UserError: if one does not.
        """
        if self.is_alone:
            return
        if self.known.rank == 0:
            self.messages.set("folder", _content(folder))
            for rank in range(1, self.known.num_processes):
                self.messages.hear(f"seen/{rank}")
            self.messages.tell("all seen", True)
            return
        content, end = self.messages.hear("folder"), time.monotonic() + SEE_SECONDS
        while _content(folder) != content:
            if time.monotonic() > end:
                raise UserError(
                    f"{socket.gethostname()} does not see {folder}, which rank 0 has on its "
                    "machine.\nUse output_dir=<a folder on a disk that all machines share>."
                )
            time.sleep(POLL_SECONDS)
        self.messages.set(f"seen/{self.known.rank}", True)
        self.messages.hear("all seen")

    @contextmanager
    def telling_failure(self) -> Iterator[None]:
        """Let the others know of what ends this process, so that they end as well."""
        try:
            yield
        except Exception as error:
            if not self.is_alone and self.messages.round and not leaving.connected.is_set():
                said = str(error)
                if not isinstance(error, UserError):
                    said = f"{type(error).__name__}: {said}"
                if not said.startswith("Rank "):
                    said = f"Rank {self.known.rank} on {socket.gethostname()}: {said}"
                with suppress(UserError, RuntimeError):  # the store has ended
                    self.messages.tell("failed", said)
            raise

    def watch(self, undo: Callable[[], None]) -> None:
        """Until all are connected, end this process where another one has failed.

        Args:
            undo: called before the end.
        """
        if self.is_alone:
            return
        threading.Thread(target=self._watch, args=(undo,), name="meeting", daemon=True).start()

    def _watch(self, undo: Callable[[], None]) -> None:
        while not leaving.connected.wait(WATCH_SECONDS):
            try:
                failure = self.messages.received("failed")
            except RuntimeError:  # of the store
                failure = "The process of rank 0 has ended."
            # Who has found the same tells it itself.
            if failure and not leaving.connected.wait(2 * WATCH_SECONDS):
                if not self.known.local_rank:
                    print(failure, file=sys.stderr, flush=True)
                undo()
                leaving.leave(1)


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What another process has otherwise than the first one, each in some words."""
    found = []
    for kind, ours in first.items():
        theirs = other.get(kind, {})
        for name in sorted(ours.keys() | theirs.keys()):
            a, b = ours.get(name), theirs.get(name)
            if a == b:
                continue
            if kind == "settings":
                found.append(f"{name}={b} instead of {a}")
            elif kind == "versions":
                found.append(f"{name} {b or 'none'} instead of {a or 'none'}")
            elif a is None or b is None:
                found.append(f"no {name}" if b is None else f"{name} besides")
            else:
                found.append(f"another {name}")
    more = [f"{len(found) - NUM_SHOWN} more"] if len(found) > NUM_SHOWN else []
    return found[:NUM_SHOWN] + more


def _content(folder: Path) -> dict[str, str]:
    """The small files of a run's folder that tell it from every other one, and from its copies."""
    found = {}
    with suppress(OSError):
        os.listdir(folder)  # lets NFS look anew
        # Not the lock's file: to close it would give up this process's lock.
        for path in folder.glob("*.yaml"):
            found[path.name] = path.read_text()
    return found
