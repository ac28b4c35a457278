"""kill -9 while a checkpoint is written: there must always be a whole one, and no other kind."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import torch

from harness.checkpoints import lookup
from harness.checkpoints.writing import DurableCheckpointIO
from harness.files import PART, remove_parts

NUM_VALUES = 1_000_000  # 4 MB: a write takes some milliseconds


def write_for_ever(folder: Path, step: int) -> None:
    """What a run does with its checkpoints, and nothing else."""
    io = DurableCheckpointIO()
    while True:
        path = lookup.path_of(folder, step)
        values = torch.full((NUM_VALUES,), float(step))

        def keep(path: Path = path) -> None:
            lookup.link_newest(path)
            lookup.remove_old(folder, 2)

        io.save_checkpoint({"step": step, "values": values}, path, keep)
        values.zero_()  # as training changes them while they are written
        step += 1


def kill_while_writing(folder: Path, num_kills: int, seed: int) -> int:
    """Kill a writing process again and again; return how often it could not have gone on."""
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    num_unusable, newest_step = 0, 0
    for _ in range(num_kills):
        pid = os.fork()
        if pid == 0:
            try:
                write_for_ever(folder, newest_step + 1)
            finally:
                os._exit(1)
        end = time.monotonic() + 60
        while not list(folder.glob(f".*{PART}")) and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        path, skipped = lookup.newest_whole(folder)
        written = newest_step > 0 or path is not None
        if path is not None:
            checkpoint = torch.load(path, weights_only=True)
            step = checkpoint["step"]
            is_good = bool((checkpoint["values"] == step).all()) and step >= newest_step
            newest_step = max(newest_step, step)
        num_unusable += bool(skipped) or (written and (path is None or not is_good))
        remove_parts(folder)
    return num_unusable
