import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BasePredictionWriter

from harness.errors import UserError
from harness.files import write_durably
from harness.processes.agreement import gather


class PredictionTable(BasePredictionWriter):
    """Write predictions of all processes to one CSV, a row per sample, in the data set's order.

    ``predict_step`` may return a tensor with a row per sample, a list with a text or a number per
    sample, and dicts, tuples or lists of these: their keys and positions become the columns' names,
    such as ``scores.0``. Of a list with one dict per sample, as of detected objects, each key
    becomes a column whose cells hold lists.

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
        prediction: Any,
        batch_indices: Sequence[int] | None,
        *_: Any,
    ) -> None:
        """Keep the rows of one batch."""
        assert batch_indices is not None, "Lightning tracks the indices of a DataLoader"
        columns = columns_of(prediction, "", len(batch_indices))
        for row, index in enumerate(batch_indices):
            self.rows[index] = {name: column[row] for name, column in columns.items()}

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the rows and write the file, which appears only when it is complete."""
        parts = gather(trainer, self.rows)
        if trainer.is_global_zero:
            rows = {index: row for part in parts for index, row in part.items()}
            # Batches may differ in their columns: texts are not all of one length.
            names = dict.fromkeys(name for row in rows.values() for name in row)
            text = io.StringIO(newline="")
            table = csv.DictWriter(text, ["sample", *names])
            table.writeheader()
            table.writerows({"sample": index} | rows[index] for index in sorted(rows))
            write_durably(self.path, text.getvalue().encode())


def columns_of(value: Any, name: str, num_samples: int) -> dict[str, list[Any]]:
    """Names and values of the columns in what ``predict_step`` has returned.

    Raises:
        UserError: if something does not have one row per sample.
    """
    if isinstance(value, torch.Tensor) and value.ndim == 1:
        value = value.tolist()
    elif isinstance(value, torch.Tensor) and value.ndim > 1:  # (B, ...): a column per position
        value = tuple(value.flatten(start_dim=1).unbind(dim=1))
    elif isinstance(value, list):
        is_columns = all(
            isinstance(v, torch.Tensor) and v.shape[:1] == (num_samples,) for v in value
        )
        if is_columns and len(value) == num_samples:
            raise UserError(
                f"predict_step returned a list of {num_samples} tensors of as many numbers for "
                f"{num_samples} samples: these may be rows or columns.\n"
                "Return a tuple of columns, or torch.stack(list) for rows."
            )
        if is_columns or len(value) != num_samples:
            value = tuple(value)
        elif all(isinstance(v, Mapping) for v in value):
            value = {key: [cell(sample[key]) for sample in value] for key in value[0]}
        else:
            value = [cell(v) for v in value]
    if isinstance(value, tuple):
        value = dict(enumerate(value))
        name = name or "prediction"
    if isinstance(value, Mapping):
        parts = {key if not name else f"{name}.{key}": part for key, part in value.items()}
        columns = [columns_of(part, str(key), num_samples) for key, part in parts.items()]
        return {key: column for part in columns for key, column in part.items()}
    if not isinstance(value, list) or len(value) != num_samples:
        found = f"{len(value)} rows" if isinstance(value, list) else f"a {type(value).__name__}"
        raise UserError(
            f"predict_step returned {found} for {num_samples} samples"
            f"{f' in {name}' if name else ''}. Return one row per sample."
        )
    return {name or "prediction": value}


def cell(value: Any) -> Any:
    """A value as it stands in one cell."""
    return value.tolist() if isinstance(value, torch.Tensor) else value
