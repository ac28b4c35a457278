"""What a call of a split module does beside the module's own work."""

import pytest
import torch
from torch import nn

from harness.strategies.parallel_forward import ParallelForward

CPU = torch.device("cpu")


@pytest.fixture
def split_over():
    """Split a module over logical devices until the test ends."""
    installed = []

    def install(module, num_rows, num_devices=2, **options):
        installed.append(ParallelForward(module, [CPU] * num_devices, **options))
        installed[-1].batch_sizes = (num_rows,)
        return installed[-1]

    yield install
    for parallel in installed:
        parallel.remove()


def test_a_split_module_inside_a_split_module_runs_whole_on_its_device(split_over):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = torch.randn(6, 3)
    expected = net(x)
    outer, inner = split_over(net, 6, 3), split_over(net[0], 6)
    torch.testing.assert_close(net(x), expected)
    assert (outer.last_sizes, inner.num_calls) == ([2, 2, 2], 0)
    net[0](x)
    assert inner.last_sizes == [3, 3]


class Masked(nn.Linear):
    def forward(self, x, mask, *, scale=None):
        return super().forward(x) @ mask


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_whole_input_is_found_by_position_and_by_keyword(by_keyword, split_over):
    net, x, mask = Masked(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    expected = net(x, mask)
    split_over(net, 4, whole_inputs=["mask"])
    actual = net(x, mask=mask) if by_keyword else net(x, mask)
    torch.testing.assert_close(actual, expected)


def test_shares_follow_what_happens_between_two_calls(split_over):
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0))
    split_over(net, 4)
    x = torch.randn(4, 3)
    assert not net(x).any()
    net.eval()
    assert net(x).all()
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(7)
    assert (net(x) == 7).all()
    net[0].requires_grad_(False)
    assert not net(x).requires_grad
    net[1] = nn.Identity()
    net.append(nn.Tanh())
    assert (net(x) < 1).all()
