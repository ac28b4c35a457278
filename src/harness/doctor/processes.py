"""Run a function in processes of their own, which may crash or wait for each other."""

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any


def in_processes(
    function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], seconds: float
) -> list[Any]:
    """The results of one process per job, in the order in which they end.

    Raises:
        TimeoutError: where a process has crashed or not ended; all are ended then.
        Exception: of the first that fails; the others might wait for it.
    """
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        results = pool.imap_unordered(_call, [(function, *job) for job in jobs])
        try:
            return [results.next(seconds) for _ in jobs]
        except multiprocessing.TimeoutError:
            raise TimeoutError(f"no answer after {seconds:.0f} seconds") from None


def _call(job: tuple[Any, ...]) -> Any:
    function, *arguments = job
    return function(*arguments)


def message(error: Exception) -> str:
    """The first line of what an exception says."""
    return (str(error).strip() or repr(error)).splitlines()[0]
