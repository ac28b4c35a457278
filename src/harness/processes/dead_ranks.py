import multiprocessing
from typing import Any

import pytorch_lightning as pl

from harness.errors import TrainingError
from harness.processes.leaving import AgreedExit, die_with_parent
from harness.processes.peers import Peers
from harness.processes.starting import connected


class DeadRanks(pl.Callback):
    """End the run within seconds when one of its processes has died, and name it.

    The others would wait for it in their next collective operation, for half an hour.
    """

    peers: Peers | None = None

    def setup(self, trainer: pl.Trainer, *_: Any) -> None:
        """Connect the processes."""
        is_spawned = multiprocessing.parent_process() is not None
        if is_spawned:
            die_with_parent()
        if trainer.world_size == 1:
            return
        self.teardown()
        address = trainer.strategy.cluster_environment.main_address  # type: ignore[attr-defined]
        broadcast = trainer.strategy.broadcast
        self.peers = Peers(trainer.global_rank, trainer.world_size, address, broadcast)
        connected.set()
        if not is_spawned:  # the parent is the first process, whose end its connection tells
            die_with_parent(0)

    def teardown(self, *_: Any) -> None:
        """Say goodbye to the others."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Part, if all processes do; else let the others know."""
        if isinstance(exception, AgreedExit):
            self.teardown()
        elif self.peers is not None:
            self.peers.fail(is_told=isinstance(exception, TrainingError))
