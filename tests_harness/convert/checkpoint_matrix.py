"""Checkpoints of every kind, and the network that each must load into, strictly and bit for bit.

    python tests_harness/convert/checkpoint_matrix.py      prints docs/checkpoints.md's table

Each function makes one checkpoint in a folder and returns its path and the bare network, which
holds the expected weights.
"""

import functools
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
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


def case(function: Callable[[Path], tuple[object, nn.Module]]) -> None:
    """Register a function that returns either a path or an object to be saved."""

    @functools.wraps(function)
    def make(folder: Path) -> tuple[Path, nn.Module]:
        content, network = function(folder)
        if isinstance(content, Path):
            return content, network
        torch.save(content, folder / "last.ckpt")
        return folder / "last.ckpt", network

    CASES[function.__name__] = make


def wrapper_case(name: str, prefix: str, in_lightning: bool) -> None:
    def make(folder: Path) -> tuple[object, nn.Module]:
        network = trained(Net())
        state = prefixed(prefix, network)
        return (lightning(state) if in_lightning else state), network

    make.__name__ = name
    case(make)


for _name, _prefix in {
    "plain_state_dict": "",
    "data_parallel": "module.",
    "compiled": "_orig_mod.",
    "data_parallel_of_compiled": "module._orig_mod.",
    "compiled_data_parallel": "_orig_mod.module.",
    "wrapped_twice": "module.module.",
    "fabric": "_forward_module.",
}.items():
    wrapper_case(_name, _prefix, in_lightning=False)
for _name, _prefix in {
    "lightning_net": "net.",
    "lightning_model": "model.",
    "lightning_other_name": "classifier.",
    "lightning_compiled_net": "net._orig_mod.",
    "lightning_parallel_net": "net.module.",
    "lightning_compiled_parallel_net": "net._orig_mod.module.",
    "lightning_parallel_compiled_net": "net.module._orig_mod.",
    "lightning_compiled_outside": "_orig_mod.net.",
    "lightning_ddp_outside": "module.net.",
    "lightning_deepspeed_consolidated": "_forward_module.net.",
    "lightning_fsdp_full": "_fsdp_wrapped_module.net._fsdp_wrapped_module.",
}.items():
    wrapper_case(_name, _prefix, in_lightning=True)


@case
def wrapped_blocks(folder: Path) -> tuple[object, nn.Module]:
    """FSDP and activation checkpointing around single blocks."""
    network = trained(Net())
    names = {
        name: name.replace("head.", "head._fsdp_wrapped_module._checkpoint_wrapped_module.")
        for name in network.state_dict()
    }
    return {names[name]: value for name, value in network.state_dict().items()}, network


@case
def loss_weights_and_metrics(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Net())
    others = {"criterion.weight": torch.ones(5), "val_acc.total": torch.tensor(7)}
    return lightning({**prefixed("net.", network), **others}), network


@case
def network_in_hyper_parameters(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Net())
    return lightning(prefixed("net.", network), hyper_parameters={"net": network}), network


@case
def odd_hyper_parameters(folder: Path) -> tuple[object, nn.Module]:
    from omegaconf import OmegaConf

    network = trained(Net())
    odd = {
        "optimizer": functools.partial(torch.optim.Adam, lr=1e-3),
        "root": Path("data"),
        "config": OmegaConf.create({"a": [1, {"b": 2}]}),
        "device": torch.device("cuda:3"),
        ("a", "tuple"): {1, 2, frozenset({3})},
    }
    return lightning(prefixed("net.", network), hyper_parameters=odd), network


@case
def lightning_1(folder: Path) -> tuple[object, nn.Module]:
    """Version 1.x: a class of Lightning in the hyper-parameters, callbacks keyed by class."""
    network = trained(Net())
    with vanishing_module("vanished_lightning", "AttributeDict", dict) as attribute_dict:
        hyper_parameters = attribute_dict(lr=0.1, hidden=64)
        state = lightning(prefixed("model.", network), hyper_parameters=hyper_parameters)
        state |= {"pytorch-lightning_version": "1.4.9", "callbacks": {attribute_dict: {"wait": 1}}}
        torch.save(state, folder / "last.ckpt")
    return folder / "last.ckpt", network


@case
def lightning_trainer(folder: Path) -> tuple[object, nn.Module]:
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

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Module(trained(Net()), width=4)
        trainer = pl.Trainer(
            max_steps=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.TensorDataset(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt", module.net


@case
def weight_averaging(folder: Path) -> tuple[object, nn.Module]:
    """Lightning's WeightAveraging callback: state_dict is the average."""
    raw, averaged = Net(), trained(Net())
    states = {"current_model_state": prefixed("net.", raw), "averaging_state": {}}
    return lightning(prefixed("net.", averaged), **states), averaged


@case
def ema_beside_state_dict(folder: Path) -> tuple[object, nn.Module]:
    averaged = trained(Net())
    return {"state_dict": Net().state_dict(), "state_dict_ema": averaged.state_dict()}, averaged


@case
def ema_submodule(folder: Path) -> tuple[object, nn.Module]:
    averaged = trained(Net())
    state = {**prefixed("net.", Net()), **prefixed("net_ema.module.", averaged)}
    return lightning({**state, "net_ema.n_averaged": torch.tensor(9)}), averaged


@case
def averaged_model(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Net())
    return torch.optim.swa_utils.AveragedModel(network).state_dict(), network


@case
def nested_entry(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Net())
    return {"epoch": 2, "model_state_dict": network.state_dict(), "optimizer": {}}, network


@case
def cuda_tensors(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Net())
    with mock.patch("torch.serialization.location_tag", return_value="cuda:7"):
        torch.save(lightning(prefixed("net.", network)), folder / "last.ckpt")
    return folder / "last.ckpt", network


@case
def legacy_file(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Net())
    torch.save(
        lightning(prefixed("net.", network), hyper_parameters={"root": Path("data")}),
        folder / "last.ckpt",
        _use_new_zipfile_serialization=False,
    )
    return folder / "last.ckpt", network


@case
def legacy_cuda_float16(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Net()).half()
    with mock.patch("torch.serialization.location_tag", return_value="cuda:1"):
        state = network.state_dict()
        torch.save(state, folder / "last.pth", _use_new_zipfile_serialization=False)
    return folder / "last.pth", network


def protocol_case(protocol: int) -> None:
    def make(folder: Path) -> tuple[object, nn.Module]:
        network = trained(Net())
        state = lightning(prefixed("net.", network), hyper_parameters={"net": network})
        torch.save(state, folder / "last.ckpt", pickle_protocol=protocol)
        return folder / "last.ckpt", network

    make.__name__ = f"protocol_{protocol}"
    case(make)


for _protocol in (3, 4, 5):
    protocol_case(_protocol)


class vanishing_module:  # noqa: N801  it is used like a function
    """A class in a module that exists only inside the block."""

    def __init__(self, module: str, name: str, base: type) -> None:
        self.module = types.ModuleType(module)
        self.cls = type(name, (base,), {"__module__": module})
        setattr(self.module, name, self.cls)

    def __enter__(self) -> type:
        sys.modules[self.module.__name__] = self.module
        return self.cls

    def __exit__(self, *_: object) -> None:
        del sys.modules[self.module.__name__]


def module_case(name: str, wrap: Callable[[nn.Module], nn.Module], **options: object) -> None:
    def make(folder: Path) -> tuple[object, nn.Module]:
        network = trained(Net())
        with vanishing_module("vanished", "TheirNet", Net) as cls, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the legacy format looks for the class's source
            theirs = cls()
            theirs.load_state_dict(network.state_dict())
            torch.save(wrap(theirs), folder / "model.pth", **options)
        return folder / "model.pth", network

    make.__name__ = name
    case(make)


module_case("pickled_module", lambda network: network)
module_case("pickled_data_parallel", nn.DataParallel)
module_case("pickled_module_in_dict", lambda network: {"model": network, "epoch": 3})
module_case("pickled_module_legacy", lambda n: n, _use_new_zipfile_serialization=False)
module_case("pickled_module_protocol_4", lambda network: network, pickle_protocol=4)


@case
def safetensors_file(folder: Path) -> tuple[object, nn.Module]:
    from safetensors.torch import save_file

    network = trained(Net())
    save_file(prefixed("_orig_mod.", network), folder / "model.safetensors")
    return folder / "model.safetensors", network


@case
def distributed_checkpoint(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Net())
    save_distributed({"model": network.state_dict()}, folder / "step-10")
    return folder / "step-10", network


@case
def lightning_sharded_folder(folder: Path) -> tuple[object, nn.Module]:
    """What FSDPStrategy(state_dict_type="sharded") writes: tensors in DCP, the rest in meta.pt."""
    network = trained(Net())
    optimizer = {"state": {"net.conv.weight": {"exp_avg": torch.ones(4)}}, "param_groups": []}
    state = {"model": prefixed("net.", network), "optimizer_0": optimizer}
    save_distributed(state, folder / "last.ckpt")
    torch.save({"pytorch-lightning_version": "2.6.6"}, folder / "last.ckpt" / "meta.pt")
    return folder / "last.ckpt", network


def save_distributed(state: dict[str, object], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)  # of one process; torch 2.6 has no word for it


class Trap(nn.Module):
    """Names that a careless replacement damages."""

    def __init__(self) -> None:
        super().__init__()
        self.submodule = nn.Linear(3, 3)
        self.net_module = nn.Linear(3, 3)
        self.module = nn.Sequential(nn.Linear(3, 3))
        self.model = nn.Linear(3, 3)


@case
def names_like_wrappers(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Trap())
    return lightning(prefixed("net.module.", network)), network


@case
def no_checksums(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Net())
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
        buffers = {
            **{
                f"of_{str(t)[6:]}": floats.to(t)
                for t in (torch.bfloat16, torch.float16, torch.float64)
            },
            **{f"of_{str(t)[6:]}": floats.to(t) for t in (torch.float8_e4m3fn, torch.float8_e5m2)},
            **{
                f"of_{str(t)[6:]}": torch.arange(6).to(t)
                for t in (torch.int8, torch.int16, torch.int32)
            },
            **{
                f"of_{str(t)[6:]}": torch.arange(6).to(t)
                for t in (torch.uint8, torch.uint16, torch.bool)
            },
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


@case
def odd_tensors(folder: Path) -> tuple[object, nn.Module]:
    network = Odd()
    return lightning(prefixed("net.", network)), network


@case
def odd_tensors_legacy(folder: Path) -> tuple[object, nn.Module]:
    network = Odd()
    state = prefixed("module.", network)
    torch.save(state, folder / "last.pth", _use_new_zipfile_serialization=False)
    return folder / "last.pth", network


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight


@case
def tied_weights(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Tied())
    return lightning(prefixed("net.", network)), network


@case
def bfloat16_network(folder: Path) -> tuple[object, nn.Module]:
    network = trained(Net()).bfloat16()
    return lightning(prefixed("net._orig_mod.", network)), network


@case
def parametrized(folder: Path) -> tuple[object, nn.Module]:
    """Names with `parametrizations` in them belong to the network."""
    network = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    return lightning(prefixed("net.module.", trained(network))), network


def tutorial_recipe(path: Path) -> dict[str, torch.Tensor]:
    """Load as most answers on the web do."""
    state = torch.load(path, map_location="cpu")
    state = state.get("state_dict", state)
    return {name.replace("module.", ""): value for name, value in state.items()}


def generous_recipe(path: Path) -> dict[str, torch.Tensor]:
    """Load as someone does who knows the names, and trusts the file to run its code."""
    state = torch.load(path, map_location="cpu", weights_only=False)
    state = state.get("state_dict", state)
    for wrapper in ("module.", "_orig_mod.", "net.", "model."):
        state = {name.replace(wrapper, ""): value for name, value in state.items()}
    return state


def converted(path: Path) -> dict[str, torch.Tensor]:
    from harness.convert import convert

    output = path.with_name("converted.pt")
    convert(path, output, force=True)
    return torch.load(output)


def outcome(load: Callable[[Path], dict[str, torch.Tensor]], path: Path, net: nn.Module) -> str:
    """Return "yes", or why the weights did not arrive as they were saved."""
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.numel() and 0 not in value.stride():
                value.zero_()
    try:
        state = load(path)
        wrong = [name for name, value in expected.items() if not same(state.get(name), value)]
        net.load_state_dict(state, strict=True, assign=True)
    except Exception as error:  # whatever goes wrong is the answer
        return type(error).__name__
    return f"{len(wrong)} wrong" if wrong else "yes"


def same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Whether both are the same bits, of the same shape and type."""
    if a is None or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = (x.resolve_conj().resolve_neg().contiguous().reshape(-1) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def main() -> None:
    recipes = (converted, tutorial_recipe, generous_recipe)
    print("| checkpoint | converter | tutorial | generous |\n| --- | --- | --- | --- |")
    good = [0, 0, 0]
    for name, make in CASES.items():
        results = []
        for i, load in enumerate(recipes):
            with tempfile.TemporaryDirectory() as folder:
                path, network = make(Path(folder))
                results.append(outcome(load, path, network))
                good[i] += results[-1] == "yes"
        print(f"| {name.replace('_', ' ')} | {' | '.join(results)} |")
    print(f"| **of {len(CASES)}** | **{good[0]}** | **{good[1]}** | **{good[2]}** |")


if __name__ == "__main__":
    main()
