import pytest
import torch

from harness import UserError
from project.models.mlp import MLP
from project.models.table_mlp import TableMLP

ROWS = torch.tensor([[0.5, -1.0, 2, 0], [0.5, -1.0, 1, 0], [0.5, -1.0, 2, 1]])


def test_categories_become_vectors_of_their_own() -> None:
    net = TableMLP(in_features=4, cardinalities=[300, 2], hidden=[8], num_classes=3).eval()
    assert [tuple(table.weight.shape) for table in net.embeddings] == [(300, 39), (2, 2)]
    first, second, third = net(ROWS)
    assert first.shape == (3,)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)


def test_numbers_alone_are_a_fully_connected_network() -> None:
    torch.manual_seed(0)
    net = TableMLP(in_features=4, cardinalities=[], hidden=[8], num_classes=1)
    torch.manual_seed(0)
    assert torch.equal(net(ROWS), MLP(4, [8], 1)(ROWS))


def test_codes_that_half_precision_confuses_are_refused() -> None:
    many = TableMLP(in_features=4, cardinalities=[300, 2], hidden=[8], num_classes=1).bfloat16()
    with pytest.raises(UserError, match=r"categories, which go up to 299.\nUse trainer.prec"):
        many(ROWS.bfloat16())
    few = TableMLP(in_features=4, cardinalities=[3, 2], hidden=[8], num_classes=1).bfloat16()
    assert few(ROWS.bfloat16()).shape == (3, 1)
