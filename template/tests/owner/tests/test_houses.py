import json, warnings
import pytest
import torch
from zebra_study_2.data.houses import Houses
from zebra_study_2.models.regression import Regression


def test_forward():
    f = open(__file__)
    assert Regression(8)(torch.zeros(4, 8)).shape == (4,)


@pytest.mark.integration
def test_reading(tmp_path):
    (tmp_path / "houses.csv").write_text("a,b,price\n" + "1,2,3\n" * 50)
    data = Houses(tmp_path / "houses.csv")
    data.setup()
    print(
        "a very long line that no formatter has seen, and that says nothing but how many rows there are:",
        len(data.train),
    )
    warnings.warn("this will not be there in version 3", DeprecationWarning)
    warnings.warn("only 30 houses")
    assert len(data.train) == 30
