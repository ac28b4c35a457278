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
    return {
        "grad": torch.is_grad_enabled(),
        "inference": product.is_inference(),
        "dtype": product.dtype,
        "cache": torch.is_autocast_cache_enabled(),
        "context": request.get(),
    }


@pytest.fixture
def threads():
    threads = DeviceThreads(TWO, threads=True)
    yield threads
    threads.close()


def test_a_thread_has_the_callers_modes(threads):
    request.set("caller")
    for mode in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16, cache_enabled=False),
    ):
        with mode:
            expected = seen()
            assert threads.run([seen, seen]) == [expected, expected]


def test_the_first_job_runs_in_the_callers_thread_and_the_others_in_their_own(threads):
    meeting = threading.Barrier(2, timeout=60)

    def job():
        meeting.wait()  # both are running
        return threading.current_thread().name

    first, second = threads.run([job, job])
    assert first == threading.current_thread().name
    assert second.startswith("replica")


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


def test_closing_ends_the_threads(threads):
    """Threads of others may begin and end meanwhile."""

    def replicas() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("replica")}

    before = replicas()
    threads.run([lambda: None, lambda: None])
    (own,) = replicas() - before
    threads.close()
    assert not own.is_alive()
