import csv
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes
from torch import Tensor

from harness import DataModule, UserError
from project.data.memory import InMemory


class Table(DataModule):
    """Numbers from a CSV with a header, or scikit-learn's 442 diabetes patients.

    Inputs are scaled to mean 0 and deviation 1 over the training rows. Targets keep their units;
    ``target_mean`` and ``target_std`` are those of the training rows, for a model to scale by.

    Args:
        path: the CSV; ``None`` takes the diabetes data (Efron et al., "Least Angle Regression",
            Annals of Statistics 2004).
        target: the column to predict.
        features: the columns to predict from; ``None`` takes all others.
        val_fraction: share of the rows kept for validation.
        test_fraction: share of the rows kept for the test.
        split_seed: decides which rows; independent of the run's seed, so that runs compare.
        predict_file: a CSV with the feature columns to predict on; ``None`` predicts on the test
            rows. The scales are learnt from ``path`` again, which must still be there.
        **kwargs: see ``DataModule``.
    """

    def __init__(
        self,
        path: str | None = None,
        target: str = "target",
        features: Sequence[str] | None = None,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        split_seed: int = 0,
        predict_file: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if min(val_fraction, test_fraction) <= 0 or val_fraction + test_fraction >= 1:
            raise ValueError("val_fraction and test_fraction must be above 0 and below 1 in sum.")
        self.path, self.target, self.features = path, target, features
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.split_seed, self.predict_file = split_seed, predict_file

    def make_dataset(self, split: str) -> InMemory:
        """Read the rows of one split."""
        names, inputs, targets = self.table
        if split == "predict" and self.predict_file is not None:
            _, new = read_csv("data.predict_file", self.predict_file, names)
            return InMemory(self.scaled(new))
        rows = self.split_rows["test" if split == "predict" else split]
        return InMemory(self.scaled(inputs[rows]), torch.from_numpy(targets[rows]).float())

    @cached_property
    def table(self) -> tuple[list[str], NDArray[Any], NDArray[Any]]:
        """Names of the features, their values (N, num_features), and the targets (N,)."""
        if self.path is None:
            data = load_diabetes(scaled=False)
            return data.feature_names, data.data, data.target
        chosen = None if self.features is None else [*self.features, self.target]
        names, values = read_csv("data.path", self.path, chosen)
        if self.target not in names:
            raise UserError(f"data.target={self.target} is not in {self.path}: {', '.join(names)}.")
        i = names.index(self.target)
        return names[:i] + names[i + 1 :], np.delete(values, i, axis=1), values[:, i]

    @cached_property
    def split_rows(self) -> dict[str, NDArray[Any]]:
        """Positions of the rows of each split."""
        num_rows = len(self.table[2])
        order = np.random.default_rng(self.split_seed).permutation(num_rows)
        num_val = max(1, round(self.val_fraction * num_rows))
        num_test = max(1, round(self.test_fraction * num_rows))
        val, test, train = np.split(order, [num_val, num_val + num_test])
        return {"train": train, "val": val, "test": test}

    def scaled(self, inputs: NDArray[Any]) -> Tensor:
        """Scale inputs as the training rows ask for; a column that never changes becomes 0."""
        seen = self.table[1][self.split_rows["train"]]
        std = seen.std(axis=0)
        return torch.from_numpy((inputs - seen.mean(axis=0)) / np.where(std > 0, std, 1)).float()

    @property
    def target_mean(self) -> float:
        """Mean of the training rows' targets."""
        return float(self.table[2][self.split_rows["train"]].mean())

    @property
    def target_std(self) -> float:
        """Standard deviation of the training rows' targets; 1 where they are all the same."""
        return float(self.table[2][self.split_rows["train"]].std()) or 1.0


def read_csv(
    key: str, path: str, names: Sequence[str] | None = None
) -> tuple[list[str], NDArray[Any]]:
    """Read columns of numbers from a CSV with a header.

    Args:
        key: the setting that the path comes from, for messages.
        path: the file.
        names: the columns to read; ``None`` reads all.

    Returns:
        The names, and the values of shape (N, num_columns).

    Raises:
        UserError: if the file or a column is missing, or something in it is no number.
    """
    values: list[list[float]] = []
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            chosen = list(names or header)
            if missing := [name for name in chosen if name not in header]:
                raise UserError(
                    f"{key}={path} has no column {', '.join(missing)}.\n"
                    f"It has {', '.join(header) or 'none'}."
                )
            columns = [header.index(name) for name in chosen]
            for row in filter(None, reader):
                values.append([float(row[column]) for column in columns])
                if not np.isfinite(values[-1]).all():
                    raise ValueError("a number that is not finite")
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read: {error.strerror}.") from error
    except (ValueError, IndexError) as error:
        raise UserError(
            f"{key}={path}, line {reader.line_num}: {error}.\n"
            "Choose the columns that are all numbers with data.features=[a,b]."
        ) from error
    if not values:
        raise UserError(f"{key}={path} has no rows below its header.")
    return chosen, np.array(values)
