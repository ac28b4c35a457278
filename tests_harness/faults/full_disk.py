"""Fill the disk under a run: a small tmpfs, which needs the right to mount one."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.checkpoints import lookup
from tests_harness.faults.fast_command import start
from tests_harness.faults.kills import command, run_dir, wait_for_step

ROOM_FOR_LOGS = 100_000  # bytes; a checkpoint has twice as many


@contextmanager
def small_disk(folder: Path, megabytes: int = 8) -> Iterator[Path]:
    """Mount a file system of a few megabytes."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    subprocess.run(["mount", *options], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run_into_full_disk(folder: Path, on_full_disk: str) -> tuple[int, str, bool, bool]:
    """Fill the disk while a run trains.

    Returns:
        Its status, its log, whether a checkpoint from before stands, and whether the run is
        finished by the same command when there is room again.
    """
    settings = (
        f"on_full_disk={on_full_disk}",
        "checkpoint.every_n_steps=3",
        "model.net.hidden=[128]",
    )
    with small_disk(folder) as disk:
        process = start(command(disk, 1, *settings), disk.parent / "log")
        wait_for_step(process, disk, 7)
        free = shutil.disk_usage(disk).free
        filler = disk / "filler"
        filler.write_bytes(bytes(max(0, free - ROOM_FOR_LOGS)))
        status = process.wait(300)
        log = (disk.parent / "log").read_text()
        stands = lookup.newest_whole(run_dir(disk) / "checkpoints")[0] is not None
        filler.unlink()
        again = start(command(disk, 1, *settings), disk.parent / "log").wait(300)
        is_finished = again == 0 and (run_dir(disk) / "results.json").exists()
    return status, log, stands, is_finished
