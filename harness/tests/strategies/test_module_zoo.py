"""Every kind of module gives the same outputs and gradients, from the copies on each device."""

import functools

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from harness.strategies.parallel_forward import ParallelForward, copied
from tests.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS

CPU, META = torch.device("cpu"), torch.device("meta")
rows = functools.partial(torch.randn, dtype=torch.float64)


class Net(nn.Module):
    """A module from a forward function and its parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def tied():
    net = Net(lambda m, x: F.linear(m.a(x), m.b.weight), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    net.b.weight = net.a.weight
    return net


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


class Own(nn.Module):
    """Dynamo leaves torch's own containers alone when they are compiled in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x).tanh()


def compiled_in_place():
    net = Net(lambda m, x: m.net(x), net=Own())
    net.net.compile(backend="eager")
    return net


def compiled(backend="eager"):
    return Net(lambda m, x: m.net(x), net=torch.compile(Own(), backend=backend))


def first(module_output):
    return module_output[0]


X = (lambda: rows(7, 6),)
SEQUENCE = (lambda: rows(7, 5, 6),)

ZOO = {
    "lstm": (
        lambda: Net(lambda m, x: first(m.rnn(x)), rnn=nn.LSTM(6, 4, batch_first=True)),
        SEQUENCE,
    ),
    "tied_weights": (tied, X),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 4)), X),
    "old_spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(6, 4)), X),
    "checkpoint_reentrant": (
        lambda: Net(
            lambda m, x: checkpoint(m.a, m.b(x), use_reentrant=True), a=mlp(), b=nn.Linear(6, 6)
        ),
        X,
    ),
    "frozen": (frozen, X),
    "hooked_features": (HookedFeatures, X),
    "on_its_device": (OnItsDevice, X),
    "compiled": (compiled, X),
    "compiled_in_place": (compiled_in_place, X),
}


def made(name):
    make, inputs = ZOO[name]
    torch.manual_seed(0)
    return make().double(), [make_input() for make_input in inputs]


def gradients(module, output):
    torch.manual_seed(1)
    (output * rows(output.shape).to(output.device)).sum().backward()
    return [p.grad for p in module.parameters()]


def assert_equal(actual, expected, name, tolerance=1e-12):
    """Outputs and gradients, where a missing gradient is not the same as zero."""
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None), name
        if b is not None:
            assert torch.allclose(a.cpu(), b, rtol=tolerance, atol=tolerance), name


def two_steps(module, inputs):
    """Outputs and gradients of two calls."""
    results = []
    for _ in range(2):
        module.zero_grad()
        output = module(*inputs)
        results += [output, *gradients(module, output)]
    return results


def test_outputs_and_gradients_are_those_of_one_device():
    for i, name in enumerate(ZOO):
        num_devices = 2 + i % 2
        expected = two_steps(*made(name))
        module, inputs = made(name)
        keys, attributes = list(module.state_dict()), set(module.__dict__)

        parallel = ParallelForward(module, [CPU] * num_devices)
        parallel.batch_sizes = (7,)
        assert list(module.state_dict()) == keys, name
        actual = two_steps(module, inputs)
        parallel.remove()

        assert len(parallel.last_sizes) == num_devices, name
        assert_equal(actual, expected, name)
        assert set(module.__dict__) - {"features"} == attributes, name


def test_a_share_is_computed_on_another_device():
    """The meta device computes shapes only, and mostly refuses a tensor of the CPU."""
    for name in ZOO:
        module, inputs = made(name)
        expected = module(*inputs)
        parallel = ParallelForward(module, [CPU] * 2)
        on_meta = [x.to(META) for x in inputs]
        output = parallel.compute(META, copied(module, CPU, META), on_meta, {})
        assert output.device == META, name
        assert output.shape == expected.shape, name
        zeros = {key: x * 0 for key, x in copied(module, CPU, CPU).items()}
        assert not torch.equal(parallel.compute(CPU, zeros, inputs, {}), expected), name


def test_shares_run_compiled_code_and_compile_once():
    torch.compiler.reset()  # other tests have used up the recompilations of shared code
    num_graphs = num_runs = 0

    def backend(graph, example_inputs):
        nonlocal num_graphs
        num_graphs += 1

        def run(*args):
            nonlocal num_runs
            num_runs += 1
            return graph.forward(*args)

        return run

    module = compiled(backend)
    parallel = ParallelForward(module, [CPU] * 3)
    parallel.batch_sizes = (9,)
    for _ in range(5):
        module(torch.randn(9, 6))
    parallel.remove()
    assert num_runs == 5 * 3
    assert num_graphs == 2  # one for parameters, one for their copies
