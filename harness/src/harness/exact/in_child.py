"""Run a function in a child of this process, of which nothing is left here but its result."""

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch

from harness.processes.leaving import follow_as_worker
from harness.processes.peers import close_inherited
from harness.processes.signals import ignore_signals


def in_child(function: Callable[[], Any]) -> Any:
    """Fork, call a function there, and return or raise what it does.

    Module-level variables, closures and attributes of classes that it changes stay as they are
    here. The child has one thread, as OpenMP's do not come along, and no device.

    Raises:
        RuntimeError: if the child has ended without a result.
    """
    sys.stdout.flush(), sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run(function, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        sent = file.read()
    _, status = os.waitpid(child, 0)
    if not sent:
        raise RuntimeError(f"its process has ended with {os.waitstatus_to_exitcode(status)}")
    result, error = pickle.loads(sent)
    if error is not None:
        raise error
    return result


def _run(function: Callable[[], Any], writing: int) -> None:
    try:
        ignore_signals()
        follow_as_worker()
        close_inherited()
        torch.set_num_threads(1)
        try:
            sent = pickle.dumps((function(), None))
        except Exception as error:
            try:
                sent = pickle.dumps((None, error))
            except Exception:  # some errors cannot be sent
                sent = pickle.dumps((None, RuntimeError(str(error))))
        with os.fdopen(writing, "wb") as file:
            file.write(sent)
    finally:
        os._exit(0)
