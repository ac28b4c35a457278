"""Write the predictions of all ranks to one CSV file.

In: the return value of ``predict_step`` for each batch. Out: a table with one row per sample, in
the data set's order, and a ``.pt`` file for predictions that are not a table.
"""

import io
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.callbacks import BasePredictionWriter
from torch import Tensor

from harness.display import join_first
from harness.distributed.gather import gather
from harness.files import write_durably
from harness.loggers import metrics_table

log = logging.getLogger(__name__)

OWN_COLUMNS = ("loader", "sample")
MAX_COLUMNS = 32  # of a tensor, because a wider table is hard to read
SINGLE = (str, bytes, bool, int, float, complex)
Row: TypeAlias = tuple[int, int, int | None, dict[str, Any]]  # loader, batch, index, cells


class PredictionTable(BasePredictionWriter):
    """Write predictions to one CSV file, with one row per sample, in the data set's order.

    ``predict_step`` may return:

    - a tensor or an array with one row per sample; each position in a row becomes a column
    - a list with one element per sample; elements become cells, and dicts become columns
    - dicts, tuples and dataclasses of these; keys and positions name the columns: ``logits.0``
    - ``None``, for a batch without predictions

    Samples of a stream are numbered in their order of arrival: by batch, then by rank.

    A batch without one row per sample goes into a ``.pt`` file next to the table. So does a tensor
    with more than 32 numbers per sample, such as a mask. ``torch.load(weights_only=True)`` reads
    the file as a list of dicts. The keys of a dict are ``loader``, ``batch``, ``samples`` (indices,
    or None) and ``prediction`` (the return value, or its tensors by name).

    Args:
        path: the CSV file.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)
        self.rows: list[Row] = []
        self.batches: list[dict[str, Any]] = []  # batches that are not a table
        self.reason = ""  # why the first of these batches does not fit into the table
        self.last_indices: Sequence[int] | None = None

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any = None,
        batch_idx: int = 0,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the rows of one batch."""
        # Lightning passes the last batch's indices again if it does not know those of this batch.
        has_indices = bool(batch_indices) and batch_indices is not self.last_indices
        indices = list(batch_indices or ()) if has_indices else None
        self.last_indices = batch_indices
        if prediction is None:
            return
        rest, reason = to_plain(prediction), ""
        num_samples = len(indices) if indices else batch_size(rest)
        columns: dict[str, Any] = {}
        try:
            columns = columns_of(rest, "", num_samples)
            rest = {n: columns.pop(n) for n, v in [*columns.items()] if isinstance(v, Tensor)}
            reason = ", ".join(
                f"{n} has {v[0].numel():,} numbers per sample" for n, v in rest.items()
            )
        except ValueError as error:
            reason = str(error)
        if reason:
            self.reason = self.reason or reason
            position = {"loader": dataloader_idx, "batch": batch_idx, "samples": indices}
            self.batches.append(position | {"prediction": rest})
        for row in range(num_samples if columns else 0):
            cells = {name: column[row] for name, column in columns.items()}
            index = indices[row] if indices else None
            self.rows.append((dataloader_idx, batch_idx, index, cells))

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the rows of all ranks, and write the files atomically on rank 0."""
        ranks = gather(trainer, (self.rows, self.batches, self.reason), to_first=True)
        if not trainer.is_global_zero:
            return
        rows = [row for rank in ranks for row in rank[0]]
        batches = [batch for rank in ranks for batch in rank[1]]
        if batches:
            path, file = self.path.with_suffix(".pt"), io.BytesIO()
            torch.save(sorted(batches, key=lambda b: (b["loader"], b["batch"])), file)
            write_durably(path, file.getvalue())
            reason = next(rank[2] for rank in ranks if rank[2])
            log.warning(
                "%s holds %d batches that do not fit into a table: %s", path, len(batches), reason
            )
        if rows:
            loader = getattr(trainer, "predict_dataloaders", None)
            data_columns = getattr(getattr(loader, "dataset", None), "sample_columns", {})
            write(self.path, number_rows(rows), data_columns)
        elif not batches:
            log.warning("%s was not written, because predict_step returned nothing.", self.path)


def to_plain(value: Any) -> Any:
    """Convert a value to tensors, dicts, lists, tuples and numbers; other objects become texts."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value.copy())
    elif isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value) and not isinstance(value, (Mapping, type)):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Tensor):
        value = value.detach().cpu().clone()
        return value if type(value) is Tensor else value.as_subclass(Tensor)
    if isinstance(value, Mapping):
        return {k if isinstance(k, int) else str(k): to_plain(item) for k, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(to_plain, value))
    return value if value is None or isinstance(value, SINGLE) else str(value)


def batch_size(prediction: Any) -> int:
    """Return the length of the first tensor or list of a prediction, or 1 if it has none."""
    while isinstance(prediction, (dict, tuple)) and prediction:
        prediction = next(iter(prediction.values() if isinstance(prediction, dict) else prediction))
    is_scalar = isinstance(prediction, Tensor) and prediction.ndim == 0
    return len(prediction) if isinstance(prediction, (Tensor, list)) and not is_scalar else 1


def columns_of(value: Any, name: str, num_samples: int) -> dict[str, Any]:
    """Return the columns of a result of ``to_plain``: lists of cells by name.

    A tensor with more than ``MAX_COLUMNS`` numbers per sample stays a tensor.

    Raises:
        ValueError: a part of the prediction does not have one row per sample.
    """
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        if value.ndim < 2:
            value = value.tolist()
        elif len(value) == num_samples:  # (B, ...): a column per position
            if value[0].numel() > MAX_COLUMNS:
                return {name or "prediction": value}
            value = tuple(value.flatten(start_dim=1).unbind(dim=1))
    elif isinstance(value, list) and len(value) == num_samples:
        if all(isinstance(sample, dict) for sample in value):
            keys = dict.fromkeys(key for sample in value for key in sample)
            value = {key: [sample.get(key) for sample in value] for key in keys}
        else:
            value = apply_to_collection(value, Tensor, Tensor.tolist)  # each element is a cell
    if isinstance(value, tuple):
        value, name = dict(enumerate(value)), name or "prediction"
    if isinstance(value, dict):
        columns: dict[str, Any] = {}
        for key, part in value.items():
            if part is not None:
                columns |= columns_of(part, f"{name}.{key}" if name else str(key), num_samples)
        return columns
    if isinstance(value, SINGLE) and num_samples == 1:
        value = [value]
    if not isinstance(value, list) or len(value) != num_samples:
        is_rows = isinstance(value, (list, Tensor))
        returned = f"{len(value)} rows" if is_rows else f"a {type(value).__name__}"
        where = f" in {name}" if name else ""
        raise ValueError(
            f"predict_step returned {returned} for {num_samples} samples{where}. Return one row "
            "per sample. For several columns, return a tuple or a dict."
        )
    return {f"prediction.{name}" if name in OWN_COLUMNS else name or "prediction": value}


def number_rows(rows: list[Row]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the cells of each row by loader and sample index, or for streams by row number.

    Args:
        rows: the rows of rank 0, of rank 1, and so on. Rows of a batch stay in this order.
    """
    streams = {loader for loader, _, index, _ in rows if index is None}
    by_number: dict[tuple[int, int], dict[str, Any]] = {}
    num_rows: Counter[int] = Counter()
    for loader, _, index, cells in sorted(rows, key=lambda row: row[:2]):
        number = num_rows[loader] if index is None or loader in streams else index
        by_number[loader, number] = cells
        num_rows[loader] += 1
    return by_number


def write(
    path: Path, rows: Mapping[tuple[int, int], dict[str, Any]], data_columns: Mapping[str, Any]
) -> None:
    """Write the table. ``data_columns`` of the data set come before the predictions' columns."""
    kinds = {(loader, frozenset(row)) for (loader, _), row in rows.items()}
    names = dict.fromkeys(name for row in rows.values() for name in row)  # batches may differ
    loaders = {loader for loader, _ in kinds}
    if len(kinds) > len(loaders):
        log.warning(
            "Batches have different columns (%s), perhaps because of padding. Return a list with "
            "each sample's own numbers (row[:length].tolist()), or the same number of columns.",
            join_first((name for name in names if any(name not in row for _, row in kinds)), 3),
        )
    own = OWN_COLUMNS if len(loaders) > 1 else OWN_COLUMNS[1:]
    data_columns = {name: column for name, column in data_columns.items() if name not in names}
    lines = (
        {"loader": loader, "sample": number}
        | {name: column[number] for name, column in data_columns.items()}
        | rows[loader, number]
        for loader, number in sorted(rows)
    )
    metrics_table.write(path, [*own, *data_columns, *names], lines)
