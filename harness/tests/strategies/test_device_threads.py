"""A thread sees what the caller sees."""

import contextvars
import threading

import pytest
import torch

from harness.strategies.device_threads import DeviceThreads

TWO = [torch.device("cpu")] * 2
request = contextvars.ContextVar("request", default=None)


def seen():
    a = torch.ones(2, 2, requires_grad=True)
    product = a @ a
    cache = torch.is_autocast_cache_enabled()
    return torch.is_grad_enabled(), product.is_inference(), product.dtype, cache, request.get()


def test_a_thread_has_the_callers_modes():
    threads = DeviceThreads(TWO, threads=True)
    request.set("caller")
    for mode in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.float16, cache_enabled=False),
    ):
        with mode:
            expected = seen()
            assert threads.run([seen, seen]) == [expected, expected]
    threads.close()


def test_jobs_run_at_the_same_time_in_threads_that_closing_ends():
    meeting = threading.Barrier(2, timeout=60)

    def job():
        meeting.wait()  # both are running
        return threading.current_thread()

    threads = DeviceThreads(TWO, threads=True)
    first, second = threads.run([job, job])
    assert first is threading.current_thread()
    assert second.name.startswith("replica")
    threads.close()
    assert not second.is_alive()


@pytest.mark.parametrize(("failing", "in_threads"), [(0, True), (1, True), (1, False)])
def test_an_exception_comes_back_with_its_device(failing, in_threads):
    def job():
        raise KeyError("missing")

    jobs = [lambda: None, lambda: None]
    jobs[failing] = job
    threads = DeviceThreads(TWO, threads=in_threads)
    with pytest.raises(KeyError) as error:
        threads.run(jobs)
    threads.close()
    notes = getattr(error.value, "__notes__", [f"Raised in replica {failing} on cpu."])
    assert notes == [f"Raised in replica {failing} on cpu."]
