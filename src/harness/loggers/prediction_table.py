import csv
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BasePredictionWriter

from harness.errors import UserError
from harness.files import write_durably
from harness.processes.agreement import gather

log = logging.getLogger(__name__)

OWN_COLUMNS = ("loader", "sample")


class PredictionTable(BasePredictionWriter):
    """Write predictions of all processes to one CSV, a row per sample, in the data set's order.

    ``predict_step`` may return a tensor with a row per sample, a list with a text or a number per
    sample, and dicts, tuples, lists and dataclasses of these: their keys and positions become the
    columns' names, such as ``scores.0``. Of a list with one dict per sample, as of detected
    objects, each key becomes a column whose cells hold lists.

    Samples are numbered by their place in the data set. Where Lightning does not know that, as of
    a stream, they are numbered as they arrive: batch by batch, and of the processes' k-th batches
    the first process's first. A column ``loader`` tells several loaders apart.

    Batches without a row per sample go into a file beside the table that ends in ``.pt``: a list
    of dicts with ``loader``, ``batch``, ``samples`` (their places, or None) and ``prediction``,
    which ``torch.load`` reads with ``weights_only=True``. Nothing is written of ``None``.

    Args:
        path: where the table goes.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}  # by loader and place
        self.arrived: list[tuple[int, int, dict[str, Any]]] = []  # loader, batch, row
        self.others: list[dict[str, Any]] = []
        self.reason = ""
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
        """Keep the rows of one batch."""
        if prediction is None:
            return
        # Lightning passes the last batch's again where it does not know this one's.
        is_known = bool(batch_indices) and batch_indices is not self.last_indices
        self.last_indices = batch_indices
        indices = list(batch_indices or ()) if is_known else None
        num_samples = num_rows(prediction) if indices is None else len(indices)
        try:
            columns = columns_of(prediction, "", num_samples)
        except UserError as error:
            self.reason = self.reason or str(error)
            place = {"loader": dataloader_idx, "batch": batch_idx, "samples": indices}
            self.others.append(place | {"prediction": plain(prediction)})
            return
        for row in range(num_samples):
            cells = {
                f"prediction.{name}" if name in OWN_COLUMNS else name: column[row]
                for name, column in columns.items()
            }
            if indices is None:
                self.arrived.append((dataloader_idx, batch_idx, cells))
            else:
                self.rows[dataloader_idx, indices[row]] = cells

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the rows and write the files, which appear only when they are complete."""
        parts = gather(trainer, (self.rows, self.arrived, self.others, self.reason))
        if not trainer.is_global_zero:
            return
        rows = {place: row for part in parts for place, row in part[0].items()}
        rows |= numbered([part[1] for part in parts], rows)
        others = sorted(
            (batch for part in parts for batch in part[2]), key=lambda b: (b["loader"], b["batch"])
        )
        if others:
            path = self.path.with_suffix(".pt")
            file = io.BytesIO()
            torch.save(others, file)
            write_durably(path, file.getvalue())
            reason = next(part[3] for part in parts if part[3]).partition("\n")[0]
            log.warning("%s holds %d batches that are no table: %s", path, len(others), reason)
        if rows:
            write_durably(self.path, table(rows).encode())
        elif not others:
            log.warning("%s is not written: predict_step has returned nothing.", self.path)


def numbered(
    parts: list[list[tuple[int, int, dict[str, Any]]]], known: Mapping[tuple[int, int], Any]
) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows by loader and number, in the order in which they have arrived.

    Args:
        parts: for each process, the loader, the batch and the cells of each row.
        known: rows whose numbers are taken.
    """
    # The sort keeps the order of equal keys: of the processes, and of the rows of a batch.
    rows = sorted((row for part in parts for row in part), key=lambda row: row[:2])
    following: dict[int, int] = {}
    for loader, number in known:
        following[loader] = max(following.get(loader, 0), number + 1)
    found = {}
    for loader, _, cells in rows:
        number = following.get(loader, 0)
        found[loader, number], following[loader] = cells, number + 1
    return found


def table(rows: dict[tuple[int, int], dict[str, Any]]) -> str:
    """The text of a CSV."""
    own = OWN_COLUMNS if len({loader for loader, _ in rows}) > 1 else OWN_COLUMNS[1:]
    # Batches may differ in their columns: texts are not all of one length.
    names = dict.fromkeys(name for row in rows.values() for name in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*own, *names], extrasaction="ignore")
    writer.writeheader()
    for loader, number in sorted(rows):
        writer.writerow({"loader": loader, "sample": number} | rows[loader, number])
    return text.getvalue()


def named(value: Any) -> Any:
    """A namedtuple or a dataclass as a dict; NumPy's arrays as tensors, or lists of texts."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if is_dataclass(value) and not isinstance(value, (Mapping, type)):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biufc" else value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def leaves(value: Any) -> Iterator[Any]:
    """What lies in dicts and tuples, however deep."""
    value = named(value)
    if isinstance(value, (Mapping, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(part)
    else:
        yield value


def num_rows(prediction: Any) -> int:
    """Samples of a batch, as its prediction shows them; single numbers and texts are of one."""
    for value in leaves(prediction):
        if isinstance(value, torch.Tensor) and value.ndim:
            return len(value)
        if isinstance(value, list):
            lengths = {len(v) if isinstance(v, torch.Tensor) and v.ndim else -1 for v in value}
            return max(lengths) if len(lengths) == 1 and lengths != {-1} else len(value)
    return 1


def columns_of(value: Any, name: str, num_samples: int) -> dict[str, list[Any]]:
    """Names and values of the columns in what ``predict_step`` has returned.

    Raises:
        UserError: if something does not have one row per sample.
    """
    value = named(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        if value.ndim == 1:
            value = value.tolist()
        elif value.ndim > 1 and len(value) == num_samples:  # (B, ...): a column per position
            value = tuple(value.flatten(start_dim=1).unbind(dim=1))
        elif value.ndim == 0 and num_samples == 1:
            value = [value.item()]
    elif isinstance(value, (str, bytes, bool, int, float, complex)) and num_samples == 1:
        value = [value]
    elif isinstance(value, list):
        is_columns = all(
            isinstance(v, torch.Tensor) and v.shape[:1] == (num_samples,) for v in value
        )
        if is_columns and len(value) == num_samples > 1:
            raise UserError(
                f"predict_step returned a list of {num_samples} tensors of as many numbers for "
                f"{num_samples} samples: these may be rows or columns.\n"
                "Return a tuple of columns, or torch.stack(list) for rows."
            )
        if is_columns or len(value) != num_samples:
            value = tuple(value)
        elif all(isinstance(v, Mapping) for v in value):
            keys = dict.fromkeys(key for sample in value for key in sample)
            value = {key: [cell(sample.get(key)) for sample in value] for key in keys}
        else:
            value = [cell(v) for v in value]
    if isinstance(value, tuple):
        value = dict(enumerate(value))
        name = name or "prediction"
    if isinstance(value, Mapping):
        parts = {key if not name else f"{name}.{key}": part for key, part in value.items()}
        columns = [
            columns_of(part, str(key), num_samples)
            for key, part in parts.items()
            if part is not None
        ]
        return {key: column for part in columns for key, column in part.items()}
    if not isinstance(value, list) or len(value) != num_samples:
        is_rows = isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim)
        found = f"{len(value)} rows" if is_rows else f"a {type(value).__name__}"
        raise UserError(
            f"predict_step returned {found} for {num_samples} samples"
            f"{f' in {name}' if name else ''}. Return one row per sample."
        )
    return {name or "prediction": value}


def cell(value: Any) -> Any:
    """A value as it stands in one cell."""
    value = named(value)
    if isinstance(value, Mapping):
        return {key: cell(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [cell(part) for part in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def plain(value: Any) -> Any:
    """A value of tensors, dicts, lists, tuples, numbers and texts alone; others become texts."""
    value = named(value)
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone().as_subclass(torch.Tensor)
    if isinstance(value, Mapping):
        return {k if isinstance(k, int) else str(k): plain(part) for k, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [plain(part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, complex):
        return torch.tensor(value)
    if hasattr(value, "to_dict"):  # a graph
        return plain(value.to_dict())
    is_plain = value is None or isinstance(value, (str, bytes, bool, int, float))
    return value if is_plain else str(value)
