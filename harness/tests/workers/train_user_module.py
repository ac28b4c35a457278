from pathlib import Path

import pytorch_lightning as pl
import torch

from harness.exact.evaluation import ExactEvaluation
from harness.exact.global_batches import GlobalBatches
from harness.run.train import close_process_group
from harness.strategies.sync_batch_norm import SyncBatchNormAnywhere
from tests.workers.user_code import UserData, UserModule


def train_user_module(devices: int, norm: bool, out: Path) -> None:
    """Train the user's module, with or without BatchNorm, as one of so many processes."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        plugins=[SyncBatchNormAnywhere()] if norm and devices > 1 else None,
        val_check_interval=2,
        precision="64-true",
        max_epochs=3,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[GlobalBatches(0), ExactEvaluation()],
    )
    model = UserModule(norm)
    # Without BatchNorm, the last batch has one sample and the validation two: fewer than processes.
    sizes = {"batch_size": 16} if norm else {"batch_size": 15, "num_test": 3}
    trainer.fit(model, UserData(num_train=61, **sizes))
    if trainer.is_global_zero:
        torch.save(model.state_dict() | trainer.callback_metrics, out / "weights.pt")
    close_process_group()
