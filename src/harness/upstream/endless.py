"""Lets training go on past its planned end, for as long as it is measured.

``tests_harness/tuning/test_speed.py`` measures runs of five steps for longer than that.
"""

import pytorch_lightning as pl

PRIVATE = {"trainer:fit_loop.epoch_loop": "max_steps"}


def train_without_end(trainer: pl.Trainer) -> None:
    """Call it in ``on_train_start``, when schedules have asked for the number of steps."""
    trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
