"""Evaluations without inference mode, whose tensors cannot be trained with afterwards.

The Trainer's argument cannot be asked for or changed once it is built. Seen in Lightning 2.6.
"""

import pytorch_lightning as pl

PRIVATE = {"trainer:fit_loop.epoch_loop.val_loop": "inference_mode"}


def use_no_grad(trainer: pl.Trainer) -> None:
    """Let all evaluations run under ``torch.no_grad`` instead."""
    trainer.fit_loop.epoch_loop.val_loop.inference_mode = False
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
