from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import UserError
from harness.tables.array_files import open_array, refuse_nan
from harness.tables.rows import Rows, SplitRows, checksum, scale_of


class Arrays(SplitRows):
    """Inputs and targets from NumPy's files, mapped into memory and read as whole batches.

    Inputs go into batches as they are, in 32 bits. Targets that are whole numbers are classes,
    from 0; with fractions they are numbers, which keep their units.

    Args:
        inputs: a ``.npy`` file of shape (N, ...).
        targets: likewise, shape (N,), or (N, K) for several numbers.
        val_inputs: with the three below, arrays of their own instead of ``val_fraction`` and
            ``test_fraction``.
        val_targets: see ``val_inputs``.
        test_inputs: see ``val_inputs``.
        test_targets: see ``val_inputs``.
        predict_inputs: new inputs; ``None`` predicts on those of the test.
        check: look at all inputs for NaN at the start.
        **kwargs: see ``SplitRows``.
    """

    def __init__(
        self,
        inputs: str,
        targets: str,
        val_inputs: str | None = None,
        val_targets: str | None = None,
        test_inputs: str | None = None,
        test_targets: str | None = None,
        predict_inputs: str | None = None,
        check: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.check = check
        self.names = {"inputs": inputs, "targets": targets, "predict_inputs": predict_inputs}
        own = {"val_inputs": val_inputs, "val_targets": val_targets}
        own |= {"test_inputs": test_inputs, "test_targets": test_targets}
        self.has_own_splits = any(own.values())
        if lacking := [name for name, value in own.items() if self.has_own_splits and not value]:
            raise UserError(
                f"data.{lacking[0]} is not set: either all of {', '.join(own)} are, or none."
            )
        if self.has_own_splits and self.fold is not None:
            raise UserError(
                f"data.fold={self.fold} has no use for arrays of their own for the test.\n"
                "Leave out data.fold, or data.test_inputs and the three others."
            )
        self.names |= own

    def learn(self) -> dict[str, Any]:
        """Sizes, and the scale of numbers."""
        inputs, targets = self.pair("train")
        facts: dict[str, Any] = {
            "in_features": int(np.prod(inputs.shape[1:])),
            "in_channels": inputs.shape[1],
            "input_shape": list(inputs.shape[1:]),
            "cardinalities": [],
            "checksum": checksum(targets),
        }
        if targets.dtype.kind == "f":
            train = targets if self.has_own_splits else targets[self.split(targets, None)["train"]]
            return facts | scale_of(train) | {"num_outputs": int(np.prod(targets.shape[1:]))}
        num_classes = 1 + max(int(targets.max()) for _, targets in self._pairs.values())
        if num_classes > max(len(targets), 2):
            raise UserError(
                f"{self.place('targets')} has the label {num_classes - 1} among "
                f"{len(targets):,}: classes count from 0.\n"
                "For numbers, save targets.astype('float32')."
            )
        return facts | {"num_classes": max(2, num_classes)}

    def make_dataset(self, split: str) -> Rows:
        """The samples of one split."""
        if split == "predict" and self.names["predict_inputs"] is not None:
            return Rows(self.checked_inputs("predict_inputs"))
        split = "test" if split == "predict" else split
        inputs, targets = self.pair(split)
        self.check_labels(split, targets)
        return Rows(inputs, targets, None if self.has_own_splits else self.split_rows[split])

    def targets_of_rows(self) -> tuple[NDArray[Any], list[str] | None]:
        """See ``SplitRows``."""
        targets = self.pair("train")[1]
        num_classes = self.facts.get("num_classes")
        return targets, num_classes and [str(label) for label in range(num_classes)]

    def pair(self, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Inputs and targets that hold a split; all splits lie in one pair unless it is said."""
        return self._pairs[split if self.has_own_splits and split != "train" else ""]

    @cached_property
    def _pairs(self) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
        prefixes = {"": "", "val": "val_", "test": "test_"} if self.has_own_splits else {"": ""}
        return {split: self._pair(prefix) for split, prefix in prefixes.items()}

    def _pair(self, prefix: str) -> tuple[NDArray[Any], NDArray[Any]]:
        inputs = self.checked_inputs(f"{prefix}inputs")
        key = f"{prefix}targets"
        targets, place = self.opened(key), self.place(key)
        if len(inputs) != len(targets):
            raise UserError(
                f"{self.place(f'{prefix}inputs')} has {len(inputs):,} samples, and {place} has "
                f"{len(targets):,}.\nGive arrays of one length."
            )
        if targets.dtype.kind == "f":
            refuse_nan(place, targets)
            return inputs, np.asarray(targets, dtype=np.float32)
        if targets.ndim != 1:
            raise UserError(
                f"{place} has classes of shape {targets.shape}: give each sample one label, (N,)."
            )
        if (lowest := int(targets.min())) < 0:
            raise UserError(
                f"{place} has the label {lowest} at sample {int(targets.argmin())}: classes count "
                "from 0.\nFor numbers, save targets.astype('float32')."
            )
        return inputs, np.asarray(targets, dtype=np.int64)

    def checked_inputs(self, key: str) -> NDArray[Any]:
        """An array of samples, mapped."""
        inputs, place = self.opened(key), self.place(key)
        if inputs.ndim < 2:
            raise UserError(f"{place} has the shape {inputs.shape}; it must be (N, ...).")
        known = None if key == "inputs" else self._shape_in_training()
        if known is not None and list(inputs.shape[1:]) != known:
            raise UserError(
                f"{place} has samples of shape {inputs.shape[1:]}; in training it was "
                f"{tuple(known)}."
            )
        if self.check:
            refuse_nan(place, inputs)
        return inputs

    def _shape_in_training(self) -> list[int] | None:
        shape = vars(self).get("facts", {}).get("input_shape")
        return None if shape is None else list(shape)

    def check_labels(self, split: str, targets: NDArray[Any]) -> None:
        """Refuse a class that the model does not have."""
        num_classes = self.facts.get("num_classes")
        if num_classes is None or targets.dtype.kind == "f" or int(targets.max()) < num_classes:
            return
        prefix = f"{split}_" if self.has_own_splits and split != "train" else ""
        raise UserError(
            f"{self.place(f'{prefix}targets')} has the label {int(targets.max())} at sample "
            f"{int(targets.argmax())}, and there are {num_classes} classes, from 0.\n"
            "Mend it, or train on these classes."
        )

    def place(self, key: str) -> str:
        """A setting as it was typed."""
        return f"data.{key}={self.names[key]}"

    def opened(self, key: str) -> NDArray[Any]:
        """An array of numbers, mapped."""
        return open_array(self.place(key), str(self.names[key]))
