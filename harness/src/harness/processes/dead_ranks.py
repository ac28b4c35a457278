"""End a run within seconds when one of its processes has died, and name it.

In: Lightning's hooks and the processes that it starts. Next: ``peers`` once all are connected;
until then the first process of a machine looks after those that it has started.
"""

import logging
import os
import signal
import subprocess
import threading
from typing import Any

import pytorch_lightning as pl

from harness.errors import TrainingError
from harness.processes import early, leaving
from harness.processes.launch import is_further_rank
from harness.processes.leaving import AgreedExit
from harness.processes.peers import Peers
from harness.upstream.processes import replace_process_observer, replace_starter

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2


class DeadRanks(pl.Callback):
    """Connect the processes of a run while its Trainer works."""

    peers: Peers | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Connect the processes."""
        if trainer.world_size == 1:
            return
        self.teardown()
        self.peers = Peers(
            trainer.global_rank,
            trainer.world_size,
            trainer.strategy.cluster_environment.main_address,  # type: ignore[attr-defined]
            trainer.strategy.broadcast,
            is_one_machine=trainer.num_nodes == 1,
        )
        leaving.connected.set()
        if is_further_rank():  # its connection tells the end of the first process, its parent
            leaving.set_parent_signal(0)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Disconnect as agreed."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None
            if is_further_rank():
                leaving.set_parent_signal(signal.SIGKILL)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Disconnect if all processes leave; else tell the others of the error."""
        if isinstance(exception, AgreedExit):
            self.teardown()
        elif self.peers is not None:
            self.peers.fail(is_logged=isinstance(exception, TrainingError))


def observe_start() -> None:
    """Let Lightning take the ranks that were started early, and observe them with ``observe``."""
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
