"""Train with synchronised BatchNorm: python -m tests.workers.train_batch_norm 2 OUT"""

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch

from project.callbacks.exact_evaluation import ExactEvaluation
from project.callbacks.uneven_batches import UnevenBatches
from project.plugins.sync_batch_norm import SyncBatchNormAnywhere
from project.run import close_process_group
from tests.workers.user_code import UserData, UserModule

devices, out = int(sys.argv[1]), Path(sys.argv[2])
trainer = pl.Trainer(
    accelerator="cpu",
    devices=devices,
    strategy="ddp" if devices > 1 else "auto",
    plugins=[SyncBatchNormAnywhere()] if devices > 1 else None,
    precision="64-true",
    max_epochs=3,
    use_distributed_sampler=False,
    logger=False,
    enable_progress_bar=False,
    enable_checkpointing=False,
    callbacks=[UnevenBatches(), ExactEvaluation()],
)
model = UserModule(norm=True)
trainer.fit(model, UserData(batch_size=16))
if trainer.is_global_zero:
    loss = trainer.callback_metrics["train/loss"]
    torch.save(model.state_dict() | {"train/loss": loss}, out / "weights.pt")
close_process_group()
