import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BasePredictionWriter


class PredictionTable(BasePredictionWriter):
    """Write predictions of all processes to one CSV, a row per sample, in the data set's order.

    ``predict_step`` returns a dict of columns, each a tensor of shape (B,).

    Args:
        path: where the file goes.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)
        self.rows: dict[int, dict[str, Any]] = {}

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: dict[str, torch.Tensor],
        batch_indices: Sequence[int] | None,
        *_: Any,
    ) -> None:
        """Keep the rows of one batch."""
        assert batch_indices is not None, "Lightning tracks the indices of a DataLoader"
        columns = {name: column.tolist() for name, column in prediction.items()}
        for row, index in enumerate(batch_indices):
            self.rows[index] = {name: column[row] for name, column in columns.items()}

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the rows and write the file, which appears only when it is complete."""
        parts: list[Any] = [self.rows]
        if trainer.world_size > 1:
            parts = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, self.rows)
        if trainer.is_global_zero:
            write(self.path, {index: row for part in parts for index, row in part.items()})


def write(path: Path, rows: dict[int, dict[str, Any]]) -> None:
    """Write one row per sample, ordered by its index."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, ["sample", *rows[0]])
        table.writeheader()
        for index in sorted(rows):
            table.writerow({"sample": index, **rows[index]})
    part.replace(path)
