"""A user's module that is tested and predicts as one of so many processes."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from harness.loggers.prediction_table import PredictionTable
from harness.training.train import close_process_group
from tests.modules.classifiers import Classifier
from tests.modules.data import Flowers, OwnData
from tests.workers.trainer import small_trainer


class Sized(OwnData):
    """As many samples as a test asks for."""

    def __init__(self, num_samples: int) -> None:
        super().__init__("Flowers", batch_size=32)
        self.num_samples = num_samples

    def make_dataset(self, split: str) -> Flowers:
        return Flowers(self.num_samples)


class Tested(Classifier):
    """Logs a metric, a mean and a largest value in its steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits, y)
        self.log("test/accuracy", self.accuracy)
        self.log("test/loss", F.cross_entropy(logits, y))
        self.log("test/largest", logits.max(), reduce_fx="max", sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"first": batch[0][:, 0], "class": self(batch[0]).argmax(dim=1)}


def evaluate_sizes(devices: int, out: Path) -> None:
    """Test and predict several numbers of samples."""
    results = {}
    for num_samples in (3, 4, 33, 359, 360):
        table = PredictionTable(out / f"{num_samples}.csv")
        trainer = small_trainer(devices, table, precision="64-true")
        data = Sized(num_samples)
        (results[num_samples],) = trainer.test(Tested(), data, verbose=False)
        trainer.predict(Tested(), data, return_predictions=False)
    if trainer.is_global_zero:
        (out / "results.json").write_text(json.dumps(results))
    close_process_group()
