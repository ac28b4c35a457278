"""Runs of a user's module as one of so many processes."""

import json
from pathlib import Path

import torch

from harness.loggers.prediction_table import PredictionTable
from harness.run.train import close_process_group
from harness.strategies.sync_batch_norm import SyncBatchNormAnywhere
from tests.workers.trainer import small_trainer
from tests.workers.user_code import UserData, UserModule


def evaluate_sizes(devices: int, out: Path) -> None:
    """Test and predict several numbers of samples."""
    results = {}
    for num_samples in (3, 4, 33, 359, 360):
        trainer = small_trainer(devices, PredictionTable(out / f"{num_samples}.csv"))
        data = UserData(num_test=num_samples, batch_size=32)
        (results[num_samples],) = trainer.test(UserModule(), data, verbose=False)
        trainer.predict(UserModule(), data, return_predictions=False)
    if trainer.is_global_zero:
        (out / "results.json").write_text(json.dumps(results))
    close_process_group()


def train_user_module(devices: int, norm: bool, out: Path) -> None:
    """Train, with or without BatchNorm."""
    trainer = small_trainer(
        devices,
        plugins=[SyncBatchNormAnywhere()] if norm and devices > 1 else None,
        val_check_interval=2,
        precision="64-true",
        max_epochs=3,
    )
    model = UserModule(norm)
    # Without BatchNorm, the last batch has one sample and the validation two: fewer than processes.
    sizes = {"batch_size": 16} if norm else {"batch_size": 15, "num_test": 3}
    trainer.fit(model, UserData(num_train=61, **sizes))
    if trainer.is_global_zero:
        torch.save(model.state_dict() | trainer.callback_metrics, out / "weights.pt")
    close_process_group()
