import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.errors import UserError
from harness.loggers.prediction_table import PredictionTable, columns_of


@pytest.mark.parametrize(
    ("returned", "columns"),
    [
        (torch.tensor([5, 6]), {"prediction": [5, 6]}),
        (torch.tensor([[1, 2], [3, 4]]), {"prediction.0": [1, 3], "prediction.1": [2, 4]}),
        (
            (torch.tensor([5, 6]), {"b": torch.tensor([[1], [2]])}),
            {"prediction.0": [5, 6], "prediction.1.b.0": [1, 2]},
        ),
        (
            {"a": [torch.tensor([i, i + 1]) for i in (1, 3, 5)], "text": ["x", "y"]},
            {"a.0": [1, 2], "a.1": [3, 4], "a.2": [5, 6], "text": ["x", "y"]},
        ),
        # Detection: boxes of each image, of which the second has none.
        (
            [{"boxes": torch.ones(1, 2), "n": 1}, {"boxes": torch.ones(0, 2), "n": 0}],
            {"boxes": [[[1, 1]], []], "n": [1, 0]},
        ),
        ([torch.tensor([1, 2, 3]), torch.tensor([4])], {"prediction": [[1, 2, 3], [4]]}),
    ],
    ids=["tensor", "matrix", "tuple", "dict", "dict_per_sample", "tensor_per_sample"],
)
def test_what_predict_step_returns_becomes_columns(returned, columns) -> None:
    assert columns_of(returned, "", num_samples=2) == columns


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(3), "returned 3 rows for 2 samples. "),
        ({"loss": torch.tensor(1.0)}, "returned a Tensor for 2 samples in loss. "),
        (None, "returned a NoneType for 2 samples. "),
        ([torch.zeros(2), torch.zeros(2)], "these may be rows or columns"),
    ],
)
def test_what_has_no_row_per_sample_is_refused(returned, message: str) -> None:
    with pytest.raises(UserError) as error:
        columns_of(returned, "", num_samples=2)
    assert message in str(error.value)


def test_rows_are_in_order_and_may_differ_in_their_columns(tmp_path: Path) -> None:
    table = PredictionTable(tmp_path / "predictions.csv")
    for indices, width in (([2, 1], 1), ([0], 2)):
        values = torch.tensor(indices).unsqueeze(1).expand(-1, width)
        table.write_on_batch_end(None, None, {"p": values}, indices)
    table.on_predict_epoch_end(SimpleNamespace(world_size=1, is_global_zero=True), None)
    with table.path.open() as file:
        rows = list(csv.reader(file))
    assert rows == [["sample", "p.0", "p.1"], ["0", "0", "0"], ["1", "1", ""], ["2", "2", ""]]
