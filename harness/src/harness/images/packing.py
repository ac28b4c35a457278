"""Decode many files at once: in processes that import no torch, with a bar on a terminal."""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from harness.errors import UserError
from harness.images.finding import Files
from harness.machine.limits import usable_cores
from harness.processes.launch import OF_LAUNCHERS

GROUP = 32  # files that a process is given at once


def decode_all(
    files: Files, side: int, channels: int, pixels: Path | None, what: str
) -> tuple[dict[int, str], list[int]]:
    """Decode every file once.

    Args:
        files: what to decode.
        side: of the squares that images become.
        channels: 1 or 3.
        pixels: a file that gets the N images, one after another; ``None`` keeps nothing.
        what: is done, for the progress bar.

    Returns:
        The positions of files that cannot be read, with the reason of each; and every image's
        checksum, 0 for these.

    Raises:
        OSError: if the disk is full.
        UserError: if a process is ended from outside, as where memory runs out.
    """
    num_files = len(files.names)
    groups = range(0, num_files, GROUP)
    num_workers = min(usable_cores(), len(groups))
    settings = {"root": str(files.root.absolute()), "side": side, "channels": channels}
    settings["pixels"] = pixels and str(pixels)
    unreadable: dict[int, str] = {}
    checksums: list[int] = []
    started = time.monotonic()
    with (
        workers(num_workers, settings) as idle,
        ThreadPoolExecutor(num_workers) as pool,
        Progress(transient=True, disable=not Console().is_terminal) as bars,
    ):
        bar = bars.add_task(what, total=num_files)

        def decode_group(first: int) -> tuple[int, dict[str, Any]]:
            names = files.names[first : first + GROUP]
            worker = idle.get()
            try:
                return len(names), ask(worker, first, names)
            finally:
                idle.put(worker)

        try:
            for num, answer in pool.map(decode_group, groups):
                if errno := answer["errno"]:
                    raise OSError(errno, os.strerror(errno))
                unreadable |= {int(row): text for row, text in answer["unreadable"].items()}
                checksums += answer["checksums"]
                bars.advance(bar, num)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    seconds = time.monotonic() - started
    print(f"{what}: {num_files:,} files, {num_files / seconds:,.0f} per second", flush=True)
    return unreadable, checksums


def ask(worker: "subprocess.Popen[str]", first: int, names: list[str]) -> dict[str, Any]:
    """Let a process decode some files."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    answer = ""
    with suppress(BrokenPipeError):
        print(json.dumps([first, names]), file=worker.stdin, flush=True)
        answer = worker.stdout.readline()
    if not answer:
        status = worker.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        raise UserError(
            f"A process that decodes images was ended ({how}), among {names[0]} and the "
            f"{len(names) - 1} files after it.\nSIGKILL often means that memory ran out."
        )
    decoded: dict[str, Any] = json.loads(answer)
    return decoded


@contextmanager
def workers(
    num_workers: int, settings: dict[str, Any]
) -> Iterator["queue.SimpleQueue[subprocess.Popen[str]]"]:
    """Processes that wait for files; they end with the block, and with this process."""
    # Not as data workers are: a fork of a process with torch's threads may hang, and a spawned
    # process would run a user's script again. They are none of a run's ranks either.
    environment = {k: v for k, v in os.environ.items() if not OF_LAUNCHERS.fullmatch(k)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "harness.images.packing_worker"]
    started: list[subprocess.Popen[str]] = []
    idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
    try:
        for _ in range(num_workers):
            started.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        for worker in started:
            assert worker.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, which is told when it is asked
                print(json.dumps(settings), file=worker.stdin, flush=True)
            idle.put(worker)
        yield idle
    finally:
        for worker in started:
            worker.kill()
        for worker in started:
            with suppress(BrokenPipeError):
                worker.communicate()
