"""What each of several jobs on one machine gets: GPUs that no other job has, or a share of threads.

The driver chooses the GPUs as ``gpus=emptiest`` does. The job inherits their locks, and holds them
as long as it lives, also where its driver was killed.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.machine import choice, limits, num_gpus
from harness.processes import launch
from harness.sweeps.jobs import SCREEN


@dataclass(frozen=True)
class Needs:
    """What a job computes on.

    Attributes:
        num_gpus: 0 for the CPU.
        min_free_gib: GiB of memory that each GPU must have free.
    """

    num_gpus: int = 0
    min_free_gib: float = 0.0


class Slots:
    """The machine, cut into equal shares: one per GPU, or one per job where a number is asked for.

    Args:
        num_parallel: jobs at a time; ``None`` is as many as there are GPUs, and one on the CPU.
    """

    def __init__(self, num_parallel: int | None) -> None:
        self.is_counted = num_parallel is not None
        self.num = num_parallel or num_gpus() or 1
        self.free = set(range(self.num))
        self.why_not = ""  # what the last job that was not started lacks

    def start(
        self, program: Sequence[str], folder: Path, needs: Needs
    ) -> "tuple[subprocess.Popen[bytes], set[int]] | None":
        """Start a job with its share of the machine.

        It is in a session of its own: Ctrl-C in the terminal reaches the driver alone.

        Args:
            program: the job's command.
            folder: of the job; what it shows goes into a file there.
            needs: what it computes on.

        Returns:
            The process, and its shares, which go back into ``free``; ``None`` where there is no
            room yet, for which ``why_not`` gives the reason.
        """
        num_shares = 1 if self.is_counted else min(max(needs.num_gpus, 1), self.num)
        if len(self.free) < num_shares:
            return None
        shares = set(sorted(self.free)[:num_shares])
        try:
            with _gpus(needs) as fds, (folder / SCREEN).open("ab") as screen:
                process = subprocess.Popen(
                    program,
                    stdin=subprocess.DEVNULL,
                    stdout=screen,
                    stderr=screen,
                    env=_threads(num_shares, self.num) | launch.job_environment(folder),
                    pass_fds=fds,
                    start_new_session=True,
                )
        except UserError as error:
            self.why_not = str(error)
            return None
        self.free -= shares
        return process, shares


@contextmanager
def _gpus(needs: Needs) -> Iterator[list[int]]:
    """Choose GPUs for the process that the block starts, and yield the locks that it inherits.

    Raises:
        UserError: where there are not enough that are free.
    """
    if not needs.num_gpus:
        yield []
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        chosen = choice.choose_emptiest(needs.num_gpus, needs.min_free_gib)
        yield [choice.locks[gpu.uuid].fileno() for gpu in chosen]
    finally:
        choice.release()  # the job's copy of a lock stays
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _threads(num_shares: int, num_all: int) -> dict[str, str]:
    """Give a job its part of the cores, as a number of threads; one alone is as a single run."""
    if num_shares == num_all:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, limits.usable_cores() * num_shares // num_all))}
