"""A split module of every kind gives the outputs and gradients of one device."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from harness.strategies.parallel_forward import ParallelForward, copy_tensors, reseed_equal_seeds
from tests.strategies.parity import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)


class Net(nn.Module):
    """A module from a forward function and its parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def tied():
    net = Net(lambda m, x: F.linear(m.a(x), m.b.weight), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    net.b.weight = net.a.weight
    return net


def shared():
    layer = nn.Linear(6, 6)
    return Net(lambda m, x: m.b(m.a(x)), a=layer, b=layer)


def frozen():
    net = mlp()
    net[0].requires_grad_(False)
    return net


class HookedFeatures(nn.Module):
    """Reads in forward what a hook, bound to the original, has stored."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.layers[0].register_forward_hook(self.store)

    def store(self, module, inputs, output):
        self.features = output

    def forward(self, x):
        self.layers(x)
        return self.features


class OnItsDevice(pl.LightningModule):
    """Makes a tensor where it is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x) + torch.ones(4, dtype=x.dtype, device=self.device)


class Own(nn.Linear):
    """Dynamo leaves torch's own classes alone when they are compiled in place."""


def compiled_in_place():
    net = Net(lambda m, x: m.net(x), net=Own(6, 4))
    net.net.compile(backend="eager")
    return net


ZOO = {
    "lstm": lambda: Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(6, 4, batch_first=True)),
    "tied_weights": tied,
    "shared_submodule": shared,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(6, 4)),
    "checkpoint_reentrant": lambda: Net(
        lambda m, x: checkpoint(m.a, m.b(x), use_reentrant=True), a=mlp(), b=nn.Linear(6, 6)
    ),
    "frozen": frozen,
    "hooked_features": HookedFeatures,
    "on_its_device": OnItsDevice,
    "compiled": lambda: Net(lambda m, x: m.net(x), net=torch.compile(Own(6, 4), backend="eager")),
    "compiled_in_place": compiled_in_place,
}


def made(name):
    torch.manual_seed(0)
    module = ZOO[name]().double()
    return module, [torch.randn(7, *((5, 6) if name == "lstm" else (6,)), dtype=torch.float64)]


def two_steps(module, inputs):
    """Outputs and gradients of two calls."""
    results = []
    for _ in range(2):
        module.zero_grad()
        output = module(*inputs)
        torch.manual_seed(1)
        (output * torch.randn(output.shape, dtype=output.dtype).to(output.device)).sum().backward()
        results += [output, *(parameter.grad for parameter in module.parameters())]
    return results


# cuDNN wants an RNN's weights in one block; copies are made one by one.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize(
    ("device", "tolerance"), [(CPU, 1e-12), pytest.param(CUDA, 1e-9, marks=pytest.mark.gpu)]
)
def test_outputs_and_gradients_are_those_of_one_device(device, tolerance):
    for i, name in enumerate(ZOO):
        num_devices = 2 + i % 2
        # On the same device: fused kernels of a GPU, as weight_norm's, round otherwise.
        (single, inputs), (module, _) = made(name), made(name)
        inputs, module = [x.to(device) for x in inputs], module.to(device)
        expected = two_steps(single.to(device), inputs)
        keys, attributes = list(module.state_dict()), set(module.__dict__)

        parallel = ParallelForward(module, [device] * num_devices)
        parallel.batch_sizes = (7,)
        assert list(module.state_dict()) == keys, name
        actual = two_steps(module, inputs)
        parallel.remove()

        assert len(parallel.last_sizes) == num_devices, name
        for a, b in zip(actual, expected, strict=True):
            assert (a is None) == (b is None), name  # a missing gradient is not one of zeros
            assert b is None or torch.allclose(a, b, rtol=tolerance, atol=tolerance), name
        assert set(module.__dict__) - {"features"} == attributes, name


def test_a_share_is_computed_on_another_device():
    """The meta device computes shapes only, and mostly refuses a tensor of the CPU."""
    for name in ZOO:
        module, inputs = made(name)
        expected = module(*inputs)
        parallel = ParallelForward(module, [CPU] * 2)
        on_meta = [x.to(META) for x in inputs]
        output = parallel.compute(META, copy_tensors(module, CPU, META), on_meta, {})
        assert output.device == META, name
        assert output.shape == expected.shape, name
        zeros = {key: x * 0 for key, x in copy_tensors(module, CPU, CPU).items()}
        assert not torch.equal(parallel.compute(CPU, zeros, inputs, {}), expected), name


class Masked(nn.Linear):
    def forward(self, x, mask, *, scale=None):
        return super().forward(x) @ mask


def test_a_whole_input_is_found_by_position_and_by_keyword():
    net, x, mask = Masked(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    expected = net(x, mask)
    parallel = ParallelForward(net, [CPU] * 2, whole_inputs=["mask"])
    parallel.batch_sizes = (4,)
    torch.testing.assert_close(net(x, mask=mask), expected)
    torch.testing.assert_close(net(x, mask), expected)


def test_generators_seeded_alike_are_separated_once_and_again_after_a_new_seed():
    generators, runs = [torch.Generator() for _ in range(3)], []
    for _ in range(2):
        for generator in generators:
            generator.manual_seed(5)  # as torch.manual_seed(5) does for every GPU
        draws = []
        for _ in range(2):
            reseed_equal_seeds(generators)  # changes nothing the second time
            draws += [torch.rand(1, generator=generator).item() for generator in generators]
        runs.append(draws)
    assert len(set(runs[0])) == 6
    assert runs[0] == runs[1]
    assert runs[0][0] == torch.rand(1, generator=torch.Generator().manual_seed(5)).item()
