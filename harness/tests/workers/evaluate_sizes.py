import json
from pathlib import Path

import pytorch_lightning as pl

from harness.exact.evaluation import ExactEvaluation
from harness.exact.global_batches import GlobalBatches
from harness.loggers.prediction_table import PredictionTable
from harness.run.train import close_process_group
from tests.workers.user_code import UserData, UserModule


def evaluate_sizes(devices: int, out: Path) -> None:
    """Test and predict several numbers of samples, as one of so many processes."""
    results = {}
    for num_samples in (3, 4, 33, 359, 360):
        predictions = PredictionTable(out / f"{num_samples}.csv")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy="ddp" if devices > 1 else "auto",
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            callbacks=[GlobalBatches(0), ExactEvaluation(), predictions],
        )
        data = UserData(num_test=num_samples, batch_size=32)
        (results[num_samples],) = trainer.test(UserModule(), data, verbose=False)
        trainer.predict(UserModule(), data, return_predictions=False)
    if trainer.is_global_zero:
        (out / "results.json").write_text(json.dumps(results))
    close_process_group()
