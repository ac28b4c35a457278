"""Checkpoints of every kind, and the network that each must load into, strictly and bit for bit.

Each function makes one checkpoint in a folder and returns its path and the bare network, which
holds the expected weights.
"""

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import nn

CASES: dict[str, Callable[[Path], tuple[Path, nn.Module]]] = {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bn(self.conv(x)).mean((2, 3)))


def trained(network: nn.Module) -> nn.Module:
    """Give every tensor values of its own, so that no two can be confused."""
    generator = torch.Generator().manual_seed(len(list(network.parameters())))
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return network


def lightning(state: dict[str, object], **entries: object) -> dict[str, object]:
    return {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": state,
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint{}": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": []}],
        "lr_schedulers": [],
        **entries,
    }


def prefixed(prefix: str, network: nn.Module) -> dict[str, torch.Tensor]:
    state = network.state_dict()
    renamed = type(state)((prefix + name, value) for name, value in state.items())
    renamed._metadata = type(state)(
        (f"{prefix}{name}".rstrip("."), value) for name, value in state._metadata.items()
    )
    return renamed


def net() -> nn.Module:
    return trained(Net())


def case(
    name: str,
    content: Callable[[nn.Module], object],
    network: Callable[[], nn.Module] = net,
    file: str = "last.ckpt",
    device: str = "cpu",
    **options: object,
) -> None:
    """Register what torch.save writes of a network, as if its tensors were on a device."""

    def make(folder: Path) -> tuple[Path, nn.Module]:
        expected = network()
        with mock.patch("torch.serialization.location_tag", return_value=device):
            torch.save(content(expected), folder / file, **options)
        return folder / file, expected

    CASES[name] = make


def own(function: Callable[[Path], tuple[Path, nn.Module]]) -> None:
    """Register a function that writes a file or a folder itself."""
    CASES[function.__name__] = function


WRAPPERS = {
    "plain_state_dict": "",
    "data_parallel": "module.",
    "compiled": "_orig_mod.",
    "data_parallel_of_compiled": "module._orig_mod.",
    "compiled_data_parallel": "_orig_mod.module.",
    "wrapped_twice": "module.module.",
    "fabric": "_forward_module.",
}
LIGHTNING_WRAPPERS = {
    "lightning_net": "net.",
    "lightning_model": "model.",
    "lightning_compiled_net": "net._orig_mod.",
    "lightning_parallel_net": "net.module.",
    "lightning_compiled_parallel_net": "net._orig_mod.module.",
    "lightning_parallel_compiled_net": "net.module._orig_mod.",
    "lightning_compiled_outside": "_orig_mod.net.",
    "lightning_ddp_outside": "module.net.",
    "lightning_deepspeed_consolidated": "_forward_module.net.",
    "lightning_fsdp_full": "_fsdp_wrapped_module.net._fsdp_wrapped_module.",
}
for _name, _prefix in WRAPPERS.items():
    case(_name, functools.partial(prefixed, _prefix))
for _name, _prefix in LIGHTNING_WRAPPERS.items():
    case(_name, lambda net, prefix=_prefix: lightning(prefixed(prefix, net)))


class Classifier(nn.Module):
    """A LightningModule's only child whose name says nothing: the weights fit the module."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = Net()


case("lightning_other_name", lambda net: lightning(net.state_dict()), lambda: trained(Classifier()))


def wrapped_blocks(net: nn.Module) -> object:
    """FSDP and activation checkpointing around single blocks."""
    wrapper = "head._fsdp_wrapped_module._checkpoint_wrapped_module."
    return {name.replace("head.", wrapper): value for name, value in net.state_dict().items()}


def odd_hyper_parameters(net: nn.Module) -> object:
    from omegaconf import OmegaConf

    odd = {
        "optimizer": functools.partial(torch.optim.Adam, lr=1e-3),
        "root": Path("data"),
        "config": OmegaConf.create({"a": [1, {"b": 2}]}),
        "device": torch.device("cuda:3"),
        ("a", "tuple"): {1, 2, frozenset({3})},
    }
    return lightning(prefixed("net.", net), hyper_parameters=odd)


def with_network(net: nn.Module) -> object:
    return lightning(prefixed("net.", net), hyper_parameters={"net": net})


OTHERS = {"criterion.weight": torch.ones(5), "val_acc.total": torch.tensor(7)}
case("wrapped_blocks", wrapped_blocks)
case("loss_weights_and_metrics", lambda net: lightning({**prefixed("net.", net), **OTHERS}))
case("network_in_hyper_parameters", with_network)
case("odd_hyper_parameters", odd_hyper_parameters)


@own
def lightning_1(folder: Path) -> tuple[Path, nn.Module]:
    """Version 1.x: a class of Lightning in the hyper-parameters, callbacks keyed by class."""
    network = net()
    with vanishing_module("vanished_lightning", "AttributeDict", dict) as attribute_dict:
        hyper_parameters = attribute_dict(lr=0.1, hidden=64)
        state = lightning(prefixed("model.", network), hyper_parameters=hyper_parameters)
        state |= {"pytorch-lightning_version": "1.4.9", "callbacks": {attribute_dict: {"wait": 1}}}
        torch.save(state, folder / "last.ckpt")
    return folder / "last.ckpt", network


@own
def lightning_trainer(folder: Path) -> tuple[Path, nn.Module]:
    """A checkpoint of the installed Lightning, after a step of training."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self, net: nn.Module, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()  # with the network in it, as many projects have
            self.net = net
            self.criterion = nn.CrossEntropyLoss(weight=torch.ones(5))

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return self.criterion(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Module(net(), width=4)
        trainer = pl.Trainer(max_steps=1, accelerator="cpu", enable_checkpointing=False, **quiet)
        data = torch.utils.data.TensorDataset(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt", module.net


def weight_averaging(averaged: nn.Module) -> object:
    """Lightning's WeightAveraging callback: state_dict is the average."""
    states = {"current_model_state": prefixed("net.", Net()), "averaging_state": {}}
    return lightning(prefixed("net.", averaged), **states)


def ema_submodule(averaged: nn.Module) -> object:
    state = {**prefixed("net.", Net()), **prefixed("net_ema.module.", averaged)}
    return lightning({**state, "net_ema.n_averaged": torch.tensor(9)})


case("weight_averaging", weight_averaging)
case(
    "ema_beside_state_dict",
    lambda net: {"state_dict": Net().state_dict(), "state_dict_ema": net.state_dict()},
)
case("ema_submodule", ema_submodule)
case("averaged_model", lambda net: torch.optim.swa_utils.AveragedModel(net).state_dict())
case("nested_entry", lambda net: {"model_state_dict": net.state_dict(), "optimizer": {}})
case("cuda_tensors", lambda net: lightning(prefixed("net.", net)), device="cuda:7")
for _protocol in (3, 4, 5):
    case(f"protocol_{_protocol}", with_network, pickle_protocol=_protocol)


@contextmanager
def vanishing_module(module: str, name: str, base: type) -> Iterator[type]:
    """A class in a module that exists only inside the block."""
    sys.modules[module] = types.ModuleType(module)
    cls = type(name, (base,), {"__module__": module})
    setattr(sys.modules[module], name, cls)
    yield cls
    del sys.modules[module]


def module_case(
    name: str, wrap: Callable[[nn.Module], object] = lambda net: net, **options: object
) -> None:
    """Register a pickled module whose class nobody has any more."""

    def make(folder: Path) -> tuple[Path, nn.Module]:
        network = net()
        with vanishing_module("vanished", "TheirNet", Net) as cls:
            theirs = cls()
            theirs.load_state_dict(network.state_dict())
            torch.save(wrap(theirs), folder / "model.pth", **options)
        return folder / "model.pth", network

    CASES[name] = make


module_case("pickled_module")
module_case("pickled_data_parallel", nn.DataParallel)
module_case("pickled_module_in_dict", lambda network: {"model": network, "epoch": 3})
module_case("pickled_module_protocol_4", pickle_protocol=4)


@own
def safetensors_file(folder: Path) -> tuple[Path, nn.Module]:
    from safetensors.torch import save_file

    network = net()
    save_file(prefixed("_orig_mod.", network), folder / "model.safetensors")
    return folder / "model.safetensors", network


class Trap(nn.Module):
    """Names that a careless replacement damages."""

    def __init__(self) -> None:
        super().__init__()
        self.submodule = nn.Linear(3, 3)
        self.net_module = nn.Linear(3, 3)
        self.module = nn.Sequential(nn.Linear(3, 3))
        self.model = nn.Linear(3, 3)


case(
    "names_like_wrappers",
    lambda net: lightning(prefixed("net.module.", net)),
    lambda: trained(Trap()),
)


@own
def no_checksums(folder: Path) -> tuple[Path, nn.Module]:
    network = net()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(network.state_dict(), folder / "last.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    return folder / "last.pt", network


class Odd(nn.Module):
    """Buffers of every element type and layout."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(4096, dtype=torch.float32)
        floats = torch.linspace(-4, 4, 24).reshape(2, 3, 4)
        types = ["bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"]
        types += ["int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64", "bool"]
        buffers = {
            **{f"of_{name}": floats.to(getattr(torch, name)) for name in types[:5]},
            **{f"of_{name}": torch.arange(6).to(getattr(torch, name)) for name in types[5:]},
            "complex64": torch.complex(floats, -floats),
            "complex128": torch.complex(floats.double(), floats.double()),
            "view": numbers[100:110],
            "every_third": numbers[::3],
            "transposed": numbers[:20].reshape(4, 5).t(),
            "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "expanded": torch.rand(3, 1).expand(3, 7),
            "empty": torch.empty(0, 4),
            "number": torch.tensor(2.5),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)


case("odd_tensors", lambda net: lightning(prefixed("net.", net)), Odd)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight


def parametrized() -> nn.Module:
    """A network to whose own names `parametrizations` belongs."""
    return trained(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))))


case("tied_weights", lambda net: lightning(prefixed("net.", net)), lambda: trained(Tied()))
case(
    "bfloat16_network",
    lambda net: lightning(prefixed("net._orig_mod.", net)),
    lambda: net().bfloat16(),
)
case("parametrized", lambda net: lightning(prefixed("net.module.", net)), parametrized)


def converted(path: Path) -> dict[str, torch.Tensor]:
    from harness.convert import convert

    output = path.with_name("converted.pt")
    convert(path, output, force=True)
    return torch.load(output)


def check(load: Callable[[Path], dict[str, torch.Tensor]], path: Path, net: nn.Module) -> None:
    """Assert that the weights arrive as they were saved, strictly."""
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.numel() and 0 not in value.stride():
                value.zero_()
    state = load(path)
    wrong = [name for name, value in expected.items() if not same(state.get(name), value)]
    assert wrong == [], path
    net.load_state_dict(state, strict=True, assign=True)


def same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Whether both are the same bits, of the same shape and type."""
    if a is None or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = (x.resolve_conj().resolve_neg().contiguous().reshape(-1) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
