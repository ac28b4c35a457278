"""Run one job per device, in threads with the caller's settings of PyTorch."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Result = TypeVar("Result")


class DeviceThreads:
    """A thread for every device but the first, whose job runs in the caller's thread.

    On a CPU the jobs run one after the other: threads would share the same cores, and which job
    draws first from the one random generator would depend on their timing.
    """

    def __init__(self, devices: Sequence[torch.device], threads: bool | None = None) -> None:
        self.devices = devices
        self.threads = devices[0].type != "cpu" if threads is None else threads
        self._pool = ThreadPoolExecutor(max_workers=len(devices), thread_name_prefix="replica")

    def run(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Results in the order of the devices; a job's exception is raised when all have ended."""
        enter = _caller_state(self.devices)

        def task(index: int) -> Result:
            try:
                with enter(self.devices[index]):
                    return jobs[index]()
            except Exception as error:
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"Raised in replica {index} on {self.devices[index]}.")
                raise

        if not self.threads:
            return [task(index) for index in range(len(jobs))]
        futures = [
            self._pool.submit(contextvars.copy_context().run, task, index)
            for index in range(1, len(jobs))
        ]
        try:
            first = task(0)
        finally:
            wait(futures)
        return [first, *(future.result() for future in futures)]

    def close(self) -> None:
        """End the threads, which frees what CUDA libraries keep per thread."""
        self._pool.shutdown()


def _caller_state(
    devices: Sequence[torch.device],
) -> Callable[[torch.device], contextlib.AbstractContextManager[None]]:
    """A context for any thread in which PyTorch's per-thread settings are the caller's."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in sorted({"cpu", devices[0].type})
    ]
    streams = {d: torch.cuda.current_stream(d) for d in devices if d.type == "cuda"}

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype, enabled in autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=cache))
            if device in streams:  # makes it the current device, too
                stack.enter_context(torch.cuda.stream(streams[device]))
            yield

    return entered
