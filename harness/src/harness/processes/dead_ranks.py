import logging
import os
import signal
import subprocess
import threading
from typing import Any

import pytorch_lightning as pl

from harness.errors import TrainingError
from harness.processes import early, leaving
from harness.processes.launch import is_rank_of_a_run
from harness.processes.leaving import AgreedExit
from harness.processes.peers import Peers
from harness.upstream.processes import replace_process_observer, replace_starter

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # before the processes are connected


class DeadRanks(pl.Callback):
    """End the run within seconds when one of its processes has died, and name it.

    The others would wait for it in their next collective operation, for half an hour.
    """

    peers: Peers | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Connect the processes."""
        if trainer.world_size == 1:
            return
        self.teardown()
        address = trainer.strategy.cluster_environment.main_address  # type: ignore[attr-defined]
        broadcast = trainer.strategy.broadcast
        self.peers = Peers(trainer.global_rank, trainer.world_size, address, broadcast)
        leaving.connected.set()
        if is_rank_of_a_run():  # the parent is the first process, whose end its connection tells
            leaving.arm(0)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Say goodbye to the others."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None
            if is_rank_of_a_run():
                leaving.arm(signal.SIGKILL)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Part, if all processes do; else let the others know."""
        if isinstance(exception, AgreedExit):
            self.teardown()
        elif self.peers is not None:
            self.peers.fail(is_told=isinstance(exception, TrainingError))


def observe_start() -> None:
    """Let Lightning start this observer instead of its own, and take what was started early."""
    leaving.connected.clear()
    if early.started:
        replace_starter(early.take)
    replace_process_observer(
        lambda processes: threading.Thread(target=observe, args=(processes,), daemon=True).start()
    )


def observe(processes: list[subprocess.Popen[bytes]]) -> None:
    """Leave when a process that this one has started ends before all are connected, and name it.

    Args:
        processes: those of the ranks after this one, in their order.
    """
    while not leaving.connected.wait(POLL_SECONDS):
        for local_rank, process in enumerate(processes, start=1):
            if status := process.poll():
                rank = int(os.environ.get("NODE_RANK", "0")) * (len(processes) + 1) + local_rank
                how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                log.error("The process of rank %d has ended at the start (%s).", rank, how)
                for other in processes:
                    other.kill()
                was_asked = -status in leaving.ASKED_TO_LEAVE or status > 128
                leaving.leave((128 - status if status < 0 else status) if was_asked else 1)
