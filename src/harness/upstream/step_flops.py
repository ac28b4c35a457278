"""Counts the floating-point operations of a step that runs as it would run unwatched.

torch's ``FlopCounterMode`` changes a step: while a dispatch mode is active some derivatives (of
``prod``) round in another way, and gradient penalties fail. Here torch only notes each operation
with its shapes, in all threads, as for a profiler; the formulas are those of ``FlopCounterMode``.

A process group's operation may end in another thread when the step is over already: what it then
notes is lost memory once the observer is gone, and the process crashes or hangs, in one of some
hundred steps under DDP. So the observer is stopped at the step's end, and goes later.

Seen in torch 2.6 to 2.13, and left out with versions that were not tested.
``tests_harness/upstream/test_step_flops.py`` compares the sums.
"""

import inspect
import io
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver
from torch.utils.flop_counter import flop_registry

PRIVATE = {
    "torch.utils.flop_counter": "flop_registry",
    "torch.profiler:ExecutionTraceObserver()": "_registered",
}
NOT_COUNTED = "not of the step"  # name of a range whose operations are none of the step's
# Kernels that hold products which torch has no formula for: the sum would be too small.
UNKNOWN = re.compile("_rnn|CompiledFunction")
QUIET_SECONDS = 0.2  # after which no thread is left that notes an operation


class StepFlops:
    """Counts from its creation to ``stop``.

    Raises:
        OSError: if there is no room for a file of a kilobyte per operation.
    """

    def __init__(self) -> None:
        self.observer = ExecutionTraceObserver()
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``end``
        with tempfile.TemporaryDirectory(prefix="flops") as folder:
            path = Path(folder, "operations.json")
            with hushed(self.said):
                self.observer.register_callback(str(path))
            # Nothing is left, however the process ends; without a file another counter runs.
            self.file = path.open("rb") if path.exists() else io.BytesIO()
        self.said.seek(0)
        if b"already registered" in self.said.read():
            self.observer._registered = False  # torch has one only, and this would take it away
        with hushed(self.said):
            self.observer.start()

    def stop(self) -> None:
        """The step is over; until ``end`` the observer costs nothing."""
        with hushed(self.said):
            self.observer.stop()
        self.stopped_time = time.monotonic()

    def end(self) -> float:
        """FLOPs of this process and all its devices; NaN where they cannot be known.

        The later after ``stop`` the better: with a process group it waits for its threads.
        """
        if dist.is_available() and dist.is_initialized():
            time.sleep(max(0.0, self.stopped_time + QUIET_SECONDS - time.monotonic()))
        with hushed(self.said):
            self.observer.unregister_callback()
        with self.file, self.said:
            try:
                return count(json.loads(self.file.read())["nodes"])
            except Exception:  # of any kind: no count is worth a run
                return math.nan


@contextmanager
def hushed(file: IO[bytes] | None = None) -> Iterator[None]:
    """Keep in a file, or nowhere, what torch's C++ would write to stderr of its beginning."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed, and nothing is written
        yield
        return
    place = os.open(os.devnull, os.O_WRONLY) if file is None else os.dup(file.fileno())
    os.dup2(place, 2)
    os.close(place)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def count(nodes: list[dict[str, Any]]) -> float:
    """The FLOPs of noted operations: of each, or of what it consists of, once.

    Args:
        nodes: in the order in which they have ended. Which is inside of which follows from this
            and from their ids, the order in which they began; what torch says itself is wrong
            where a process group's operation ends in another thread.
    """
    formulas, total = known_formulas(), 0
    wanted = {*formulas, NOT_COUNTED}
    begun: dict[int, float] = {}  # by thread, the id of the operation that the next are inside of
    for node in reversed(nodes):
        name, inputs = node["name"], node["inputs"]
        if UNKNOWN.search(name):
            return math.nan
        thread = next(one["value"] for one in node["attrs"] if one["name"] == "tid")
        if node["id"] > begun.get(thread, math.inf) or name not in wanted:
            continue
        begun[thread] = node["id"]
        if name == NOT_COUNTED:
            continue
        arguments = []
        for kind, value, shape in zip(*map(inputs.get, ("types", "values", "shapes")), strict=True):
            is_tensor = kind.startswith("Tensor")
            if is_tensor and value[5] == "meta":  # a compiler at work
                return math.nan
            arguments.append(shape if is_tensor else value)
        shapes = node["outputs"]["shapes"]
        total += applied(formulas[name], arguments, shapes if shapes[1:] else shapes[0])
    return total


def known_formulas() -> dict[str, Callable[..., int]]:
    """Torch's formulas by the names of operations."""
    found = {str(packet).replace(".", "::", 1): f for packet, f in flop_registry.items()}
    for name in [name for name in found if "product_flash_attention" in name]:
        # It lacks the CPU's, which take the same arguments.
        found[name.replace("attention", "attention_for_cpu")] = found[name]
    return found


def applied(formula: Callable[..., int], arguments: list[Any], out_shape: Any) -> int:
    """A formula's answer; it takes the first arguments of its operation, and may name no others."""
    wanted = [
        name
        for name, parameter in inspect.signature(formula).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is parameter.empty
        and name != "out_shape"
    ]
    return formula(*arguments[: len(wanted)], out_val=out_shape)
