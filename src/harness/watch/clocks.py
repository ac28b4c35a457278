"""Marks in time, on the clock of whatever does the work; none of them makes anyone wait."""

import time
from typing import Any

import torch


class HostClock:
    """For the CPU, which has done its work when the call returns."""

    def mark(self) -> Any:
        """Now."""
        return time.perf_counter()

    def seconds(self, first: Any, last: Any) -> float:
        """From one mark to a later one."""
        return float(last - first)

    def is_past(self, mark: Any) -> bool:
        """Whether ``seconds`` can be asked up to this mark."""
        return True

    def wait(self, mark: Any) -> None:
        """Return when the mark is past."""


class CudaClock(HostClock):
    """For a GPU, which gets its work long before it does it.

    A mark is an event in the device's queue. Between two of them lies what the device has spent
    on the work in between; where it had run out of work, the time until the host sent more.
    """

    def mark(self) -> Any:
        """When the device gets here."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """From one mark to a later one, both past."""
        return float(first.elapsed_time(last) / 1000)

    def is_past(self, mark: Any) -> bool:
        """Ask, without waiting."""
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        """Return when the device has got there."""
        mark.synchronize()


def clock_of(device: torch.device) -> HostClock:
    """The clock of a device; others than CUDA's are watched from the host."""
    return CudaClock() if device.type == "cuda" else HostClock()
