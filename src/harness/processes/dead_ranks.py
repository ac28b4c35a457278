import multiprocessing

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

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Connect the processes."""
        is_spawned = multiprocessing.parent_process() is not None
        if is_spawned:
            die_with_parent()
        if trainer.world_size == 1:
            return
        self.close()
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        self.peers = Peers(
            trainer.global_rank,
            trainer.world_size,
            environment.main_address,
            trainer.strategy.broadcast,
        )
        connected.set()
        if not is_spawned:  # the parent is the first process, whose end its connection tells
            die_with_parent(0)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Part."""
        self.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Part, if all processes do; else let the others know."""
        if isinstance(exception, AgreedExit):
            self.close()
        elif self.peers is not None:
            self.peers.fail(is_told=isinstance(exception, TrainingError))

    def close(self) -> None:
        """Say goodbye to the others."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None
