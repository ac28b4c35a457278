"""Checkpoints of 44 kinds, and the network that each must load into, strictly and bit for bit.

`KINDS` maps a name to what a file holds of a network, which network that is, and what writes it.
"""

import functools
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.convert import convert
from tests.modules.classifiers import Classifier

State = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight


FLOATS = ("bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64", "bool")


class Odd(nn.Module):
    """Buffers of every element type and layout."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(4096, dtype=torch.float32)
        floats = torch.linspace(-4, 4, 24).reshape(2, 3, 4)
        buffers = {
            **{f"of_{name}": floats.to(getattr(torch, name)) for name in FLOATS},
            **{f"of_{name}": torch.arange(6).to(getattr(torch, name)) for name in INTEGERS},
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


def parametrized() -> nn.Module:
    """A network to whose own names `parametrizations` belongs."""
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))


def trap() -> nn.Module:
    """A network with names that a careless replacement damages."""
    parts = {name: nn.Linear(3, 3) for name in ("submodule", "net_module", "model")}
    return nn.ModuleDict({**parts, "module": nn.Sequential(nn.Linear(3, 3))})


def trained(network: nn.Module) -> nn.Module:
    """Give every tensor values of its own, so that no two can be confused."""
    generator = torch.Generator().manual_seed(len(list(network.parameters())))
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point() and tensor.itemsize > 1 and 0 not in tensor.stride():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return network


def below(prefix: str, network: nn.Module) -> State:
    """The network's state_dict as of a module in which it has a name."""
    state: State = network.state_dict()
    for name in [*state]:
        state[prefix + name] = state.pop(name)
    return state


def lightning(state: State, **entries: object) -> dict[str, object]:
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


def lightning_of(prefix: str, **entries: object) -> Callable[[nn.Module], object]:
    """Write checkpoints of a LightningModule in which the network has a name."""
    return lambda network: lightning(below(prefix, network), **entries)


GONE = types.ModuleType("gone")  # its classes can be imported while a file is written


class TheirNet(Net):
    __module__ = "gone"


class AttributeDict(dict):  # type: ignore[type-arg]
    __module__ = "gone"


GONE.TheirNet, GONE.AttributeDict = TheirNet, AttributeDict  # type: ignore[attr-defined]


def save(content: object, path: Path, device: str = "cpu", **options: object) -> None:
    """Write with torch.save, as if tensors were on a device, and forget the classes of GONE."""
    with (
        mock.patch.dict(sys.modules, gone=GONE),
        mock.patch("torch.serialization.location_tag", return_value=device),
    ):
        torch.save(content, path, **options)


def save_without_checksums(content: object, path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, path)
    finally:
        torch.serialization.set_crc32_options(True)


class Saving(Classifier):
    """Keeps its network in its hyper-parameters, as many projects do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.criterion = net, nn.CrossEntropyLoss(weight=torch.ones(3))


def fit_and_save(module: pl.LightningModule, path: Path) -> None:
    """Write a checkpoint of the installed Lightning, after a step of training."""
    quiet: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    loader = DataLoader(TensorDataset(torch.rand(4, 6), torch.tensor([0, 1, 2, 0])), batch_size=4)
    trainer = pl.Trainer(max_steps=1, accelerator="cpu", enable_checkpointing=False, **quiet)
    trainer.fit(module, loader)
    trainer.save_checkpoint(path)


def wrapped_blocks(network: nn.Module) -> object:
    """FSDP and activation checkpointing around single blocks."""
    wrapper = "head._fsdp_wrapped_module._checkpoint_wrapped_module."
    return {name.replace("head.", wrapper): v for name, v in network.state_dict().items()}


def ema_submodule(averaged: nn.Module) -> object:
    state = below("net.", Net()) | below("net_ema.module.", averaged)
    return lightning(state | {"net_ema.n_averaged": torch.tensor(9)})


def with_network(network: nn.Module) -> object:
    return lightning(below("net.", network), hyper_parameters={"net": network})


ODD_HYPER_PARAMETERS = {
    "optimizer": functools.partial(torch.optim.Adam, lr=1e-3),
    "root": Path("data"),
    "config": OmegaConf.create({"a": [1, {"b": 2}]}),
    "device": torch.device("cuda:3"),
    ("a", "tuple"): {1, 2, frozenset({3})},
}
LIGHTNING_1 = {
    "pytorch-lightning_version": "1.4.9",
    "callbacks": {AttributeDict: {"wait": 1}},  # keyed by class
    "hyper_parameters": AttributeDict(lr=0.1, hidden=64),
}


class Kind(NamedTuple):
    """A kind of checkpoints."""

    content: Callable[[nn.Module], Any]  # what a file holds of a network
    network: Callable[[], nn.Module] = Net
    write: Callable[..., None] = save
    file: str = "last.ckpt"

    def make(self, folder: Path) -> tuple[Path, nn.Module]:
        """Write one, and return its path and the network that has the expected weights."""
        network = trained(self.network())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Lightning, about what it is given
            self.write(self.content(network), folder / self.file)
        return folder / self.file, network


def their_net(network: nn.Module) -> nn.Module:
    """The network as an object whose class no longer exists."""
    theirs = TheirNet()
    theirs.load_state_dict(network.state_dict())
    return theirs


NAMES = {
    "plain_state_dict": "",
    "data_parallel": "module.",
    "compiled": "_orig_mod.",
    "data_parallel_of_compiled": "module._orig_mod.",
    "compiled_data_parallel": "_orig_mod.module.",
    "wrapped_twice": "module.module.",
    "fabric": "_forward_module.",
}
LIGHTNING_NAMES = {
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
OTHERS = {"criterion.weight": torch.ones(5), "val_acc.total": torch.tensor(7)}
RAW = {"current_model_state": below("net.", Net()), "averaging_state": {}}
KINDS = {
    **{name: Kind(functools.partial(below, prefix)) for name, prefix in NAMES.items()},
    **{name: Kind(lightning_of(prefix)) for name, prefix in LIGHTNING_NAMES.items()},
    # The only child's name says nothing: the weights fit the module.
    "lightning_other_name": Kind(lightning_of(""), lambda: nn.ModuleDict({"classifier": Net()})),
    "lightning_1": Kind(lightning_of("model.", **LIGHTNING_1)),
    "lightning_trainer": Kind(Saving, lambda: Classifier().net, fit_and_save),
    "loss_weights_and_metrics": Kind(lambda net: lightning({**below("net.", net), **OTHERS})),
    "network_in_hyper_parameters": Kind(with_network),
    "odd_hyper_parameters": Kind(lightning_of("net.", hyper_parameters=ODD_HYPER_PARAMETERS)),
    "wrapped_blocks": Kind(wrapped_blocks),
    "weight_averaging": Kind(lightning_of("net.", **RAW)),
    "ema_beside_state_dict": Kind(
        lambda net: {"state_dict": Net().state_dict(), "state_dict_ema": net.state_dict()}
    ),
    "ema_submodule": Kind(ema_submodule),
    "averaged_model": Kind(lambda net: torch.optim.swa_utils.AveragedModel(net).state_dict()),
    "nested_entry": Kind(lambda net: {"model_state_dict": net.state_dict(), "optimizer": {}}),
    "cuda_tensors": Kind(lightning_of("net."), write=functools.partial(save, device="cuda:7")),
    **{
        f"protocol_{number}": Kind(
            with_network, write=functools.partial(save, pickle_protocol=number)
        )
        for number in (3, 4, 5)
    },
    "pickled_module": Kind(their_net),
    "pickled_data_parallel": Kind(lambda net: nn.DataParallel(their_net(net))),
    "pickled_module_in_dict": Kind(lambda net: {"model": their_net(net), "epoch": 3}),
    "pickled_module_protocol_4": Kind(their_net, write=functools.partial(save, pickle_protocol=4)),
    "safetensors": Kind(functools.partial(below, "_orig_mod."), Net, save_file, "a.safetensors"),
    "no_checksums": Kind(nn.Module.state_dict, write=save_without_checksums),
    "names_like_wrappers": Kind(lightning_of("net.module."), trap),
    "odd_tensors": Kind(lightning_of("net."), Odd),
    "tied_weights": Kind(lightning_of("net."), Tied),
    "bfloat16_network": Kind(lightning_of("net._orig_mod."), lambda: Net().bfloat16()),
    "parametrized": Kind(lightning_of("net.module."), parametrized),
}


def read_again(path: Path, suffix: str = ".pt") -> State:
    """Convert a file, and return what others read in the new one."""
    output = path.with_name(f"out{suffix}")
    convert(path, output, force=True)
    state: State = load_file(output) if suffix == ".safetensors" else torch.load(output)
    return state


def same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Whether both are the same bits, of the same shape and type."""
    if a is None or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = (x.resolve_conj().resolve_neg().contiguous().reshape(-1) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def differing(state: State, expected: State) -> list[str]:
    """Names that only one of them has, or whose tensors are not the same bits."""
    unknown = [name for name in state if name not in expected]
    return unknown + [name for name, value in expected.items() if not same(state.get(name), value)]
