"""Keeps Lightning from handling signals, which the harness answers between two steps.

On SIGTERM Lightning's handler waits in a broadcast for processes that got no signal: two processes
under ddp hung in 7 of 9 trials, and no checkpoint was written. Seen in Lightning 2.6.
"""

import pytorch_lightning as pl

PRIVATE = ("trainer:_signal_connector.register_signal_handlers",)


def keep_lightning_from_signals(trainer: pl.Trainer) -> None:
    """Let the Trainer install no handlers; call it before training, in each process."""
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
