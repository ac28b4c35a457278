"""Of what a file holds, the weights are taken whole or not at all."""

import argparse
import re
import shlex
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.convert import CheckpointError, Report, convert

from .checkpoint_matrix import lightning, prefixed, same


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def taken(root: object, folder: Path, **options: object) -> dict[str, torch.Tensor]:
    torch.save(root, folder / "in.ckpt")
    convert(folder / "in.ckpt", folder / "out.pt", force=True, **options)
    return torch.load(folder / "out.pt")


def report(root: object, folder: Path, **options: object) -> Report:
    torch.save(root, folder / "in.ckpt")
    return convert(folder / "in.ckpt", folder / "out.pt", dry_run=True, **options)


def refusal(root: object, folder: Path, **options: object) -> str:
    (folder / "out.pt").unlink(missing_ok=True)
    with pytest.raises(CheckpointError) as caught:
        taken(root, folder, **options)
    assert not (folder / "out.pt").exists()
    return str(caught.value)


def keys_in(text: str) -> list[str]:
    """Return the values of --key in a message, as a shell understands them."""
    options = re.findall(r"--key ('[^']*'|[^' ]+)", text)
    return [word for option in options for word in shlex.split(option)]


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"a": torch.ones(2)}, "weights"),
        ([torch.ones(1), torch.ones(2)], "weights"),
        ({"deep": [({"a": torch.ones(1)},)]}, "weights.deep.0.0"),
        (nn.Linear(2, 2), "weights"),
        ({"a": torch.eye(2).to_sparse()}, None),
    ],
    ids=["dict", "list", "deep", "module", "sparse"],
)
def test_tensors_are_not_left_behind(other: object, key: str | None, tmp_path: Path) -> None:
    """What is suggested instead can be typed."""
    for root, start in (
        ({"step": torch.tensor(5), "weights": other}, ""),
        ({"model": {"step": torch.tensor(5), "weights": other}}, "model."),
    ):
        expected = [] if key is None else [f"{start}{key}"]
        for options in ({}, {"key": start.rstrip(".")}):
            assert keys_in(refusal(root, tmp_path, **options)) == expected
        for suggested in expected:
            assert report(root, tmp_path, key=suggested).tensors


def test_what_holds_no_tensor_is_left_behind(tmp_path: Path) -> None:
    root = {"a": torch.ones(1), "names": [["x"]], "set": {1}, "none": None}
    assert taken(root, tmp_path).keys() == {"a"}


@pytest.mark.parametrize("raw", ["model", "anything"])
def test_an_average_without_buffers_is_not_the_weights(raw: str, tmp_path: Path) -> None:
    net, average = network(), dict(network().named_parameters())
    state = taken({raw: net.state_dict(), "ema": average}, tmp_path)
    assert all(same(state[name], value) for name, value in net.state_dict().items())
    holder = {"decay": torch.tensor(0.9), "shadow": network().state_dict()}
    state = taken({raw: net.state_dict(), "ema": holder}, tmp_path)
    assert all(same(state[name], value) for name, value in holder["shadow"].items())
    whole = {f"module.{name}": value for name, value in network().state_dict().items()}
    state = taken({raw: net.state_dict(), "ema": whole}, tmp_path)
    assert all(same(state[name], whole[f"module.{name}"]) for name in net.state_dict())


def test_a_result_without_tensors_is_refused(tmp_path: Path) -> None:
    state = {"net.w": torch.ones(2), "net.b._extra_state": {"a": 1}}
    root = {"state_dict": state, "pytorch-lightning_version": "2"}
    with pytest.raises(CheckpointError, match="holds no tensor"):
        taken(root, tmp_path, prefix="net.b")
    assert not (tmp_path / "out.pt").exists()


def test_two_modules_are_not_told_apart(tmp_path: Path) -> None:
    root = {"first": network().state_dict(), "second": network()}
    assert keys_in(refusal(root, tmp_path)) == ["first", "second"]
    for key in ("first", "second"):
        network().load_state_dict(taken(root, tmp_path, key=key))
    assert keys_in(refusal([network().state_dict(), network()], tmp_path)) == ["0", "1"]


class OwnParallel(nn.DataParallel):
    pass


class OwnAverage(torch.optim.swa_utils.AveragedModel):
    pass


class OnlyModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


@pytest.mark.parametrize("wrapper", [OwnParallel, OwnAverage])
def test_a_class_derived_from_a_wrapper_is_one(wrapper: type, tmp_path: Path) -> None:
    net = network()
    net.load_state_dict(taken(wrapper(net), tmp_path))
    only = OnlyModule()
    only.load_state_dict(taken(wrapper(only), tmp_path))
    assert taken(only, tmp_path).keys() == {"module.weight", "module.bias"}


class OwnDict(dict):
    pass


def test_a_dict_of_another_class_is_a_dict(tmp_path: Path) -> None:
    state = OwnDict(network().state_dict())
    for root in (state, OwnDict(state_dict=state), {"model": state}):
        assert taken(root, tmp_path).keys() == state.keys()
    assert taken({"a": {"b": state}}, tmp_path, key="a.b").keys() == state.keys()


def averaged(name: str, average: nn.Module) -> dict[str, object]:
    """Return what a checkpoint has beside {"model": ...} for an average of the network."""
    state = average.state_dict()
    wrapped = {f"module.{name}": value for name, value in state.items()}
    return {
        "timm": {"state_dict_ema": state},
        "rtdetr": {"ema": {"module": state, "updates": 3}},
        "torchvision": {"model_ema": {**wrapped, "n_averaged": torch.tensor(3)}},
        "shadow": {"ema": {"decay": 0.99, "shadow": state}},
        "pickled": {"ema": average, "updates": 3},
    }[name]


@pytest.mark.parametrize("name", ["timm", "rtdetr", "torchvision", "shadow", "pickled"])
def test_an_average_of_the_same_names_is_taken_and_said(name: str, tmp_path: Path) -> None:
    raw, average = network(), network()
    root = {"model": raw.state_dict(), **averaged(name, average), "epoch": 3}
    state = taken(root, tmp_path)
    assert all(same(state[name], value) for name, value in average.state_dict().items())
    (note,) = report(root, tmp_path).notes
    assert note.endswith(" is the average of model; --no-ema takes that")
    state = taken(root, tmp_path, ema=False)
    assert all(same(state[name], value) for name, value in raw.state_dict().items())
    assert report(root, tmp_path, ema=False).notes == []
    alone = taken({**averaged(name, average), "optimizer": {"state": {}}, "epoch": 3}, tmp_path)
    assert all(same(alone[name], value) for name, value in average.state_dict().items())


@pytest.mark.parametrize(
    ("other", "options"),
    [
        (
            {"ema": {"decay": 0.9, "shadow_params": [*network().parameters()]}},
            ["ema.shadow_params"],
        ),
        ({"ema": dict(network().named_parameters())}, ["ema"]),
        ({"callbacks": {"EMA{a: 1}": {"ema_weights": network().state_dict()}}}, None),
        ({"optimizer_states": [{"ema": (*network().parameters(),)}]}, ["optimizer_states.0.ema"]),
    ],
    ids=["a list", "parameters", "callback", "optimizer"],
)
def test_an_average_that_is_left_out_is_said(
    other: dict[str, object], options: list[str] | None, tmp_path: Path
) -> None:
    root = {"model": (net := network()).state_dict(), **other}
    state = taken(root, tmp_path)
    assert all(same(state[name], value) for name, value in net.state_dict().items())
    (note,) = report(root, tmp_path).notes
    assert "may be an average, and is left out" in note
    assert keys_in(note) == (options or ["callbacks.EMA{a: 1}.ema_weights"])
    assert len(report(root, tmp_path, key=keys_in(note)[0]).tensors) >= 4


def test_an_average_beside_what_it_averages_is_found_by_its_prefix(tmp_path: Path) -> None:
    net = network()
    both = {**prefixed("online_model.", network()), **prefixed("ema_model.", net)}
    root = {"model": network().state_dict(), "ema": {**both, "step": torch.tensor(3)}}
    (note,) = report(root, tmp_path).notes
    assert "--key ema --prefix ema_model takes it" in note
    state = taken(root, tmp_path, key="ema", prefix="ema_model")
    assert all(same(state[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize("start", ["net.", ""])
def test_an_average_in_a_lightning_callback_can_be_taken(start: str, tmp_path: Path) -> None:
    """Whether its names begin at the LightningModule or at the network."""
    net = network()
    callbacks = {"EMACallback": {"average_model_state": prefixed(start, net)}}
    root = lightning(prefixed("net.", network()), callbacks=callbacks)
    (key,) = keys_in(report(root, tmp_path).notes[0])
    net.load_state_dict(taken(root, tmp_path, key=key))


@pytest.mark.parametrize("start", ["net.", ""])
def test_an_average_that_lacks_tensors_says_which(start: str, tmp_path: Path) -> None:
    """A moving average of the parameters alone has no statistics of BatchNorm."""
    average = dict(network().named_parameters())
    root = lightning(prefixed(start, network()), my_ema=average)
    (note,) = report(root, tmp_path, key="my_ema").notes
    assert note == (
        "my_ema lacks 3 of the 7 tensors of state_dict: "
        "1.running_mean, 1.running_var, 1.num_batches_tracked"
    )
    whole = {**root, "my_ema": prefixed(start, network())}
    assert report(whole, tmp_path, key="my_ema").notes == []


@pytest.mark.parametrize("wrap", [lightning, dict])
@pytest.mark.parametrize("first", ["student.", "backbone.", ""])
def test_a_teacher_that_is_taken_with_its_student_is_said(
    wrap: Callable[[object], object], first: str, tmp_path: Path
) -> None:
    state = prefixed(first, network()) | prefixed("teacher.", network())
    for start in ("", "net."):
        root = wrap({f"{start}{name}": value for name, value in state.items()})
        place, other = f"{start}teacher", (start + first).strip(".") if first else "the rest"
        (note,) = report(root, tmp_path).notes
        assert note == (
            f"{place} may be a copy of {other} (an average, a teacher), and both are taken; "
            f"--prefix {place} takes it alone"
        )
        assert len(report(root, tmp_path, prefix=place).tensors) == 7


@pytest.mark.parametrize("name", ["teacher", "old"])
def test_a_copy_of_the_network_that_is_left_out_is_said(name: str, tmp_path: Path) -> None:
    root = lightning(prefixed("net.", network()) | prefixed(f"{name}.", network()))
    (note,) = report(root, tmp_path).notes
    assert note == f"{name} may be a copy of net, and is left out; --prefix {name} takes it"


def test_a_copy_in_an_entry_of_its_own_is_said(tmp_path: Path) -> None:
    root = {"model": network().state_dict(), "teacher": network().state_dict(), "epoch": 1}
    (note,) = report(root, tmp_path).notes
    assert note == "teacher may be a copy of model, and is left out; --key teacher takes it"


def test_layers_that_are_alike_are_no_copies(tmp_path: Path) -> None:
    net = nn.ModuleDict({"target": nn.Linear(2, 2), "second": nn.BatchNorm1d(2)})
    alike = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for state in (alike.state_dict(), net.state_dict()):
        assert report(lightning(state), tmp_path).notes == []


MOMENTS = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}, "param_groups": []}


@pytest.mark.parametrize(
    ("root", "keys"),
    [
        ({"config": {"rate": 1}, "mean": torch.tensor(3.0), "std": torch.tensor(1.0)}, [""]),
        ({"args": argparse.Namespace(lr=1), "mean": torch.ones(3)}, [""]),
        ({"stats": {"mean": torch.tensor(3.0)}, "weights": b"other"}, ["stats"]),
        ({"config": {"mean": torch.ones(3)}, "arch": "resnet"}, ["config"]),
        (
            {
                "net": {"encoder": network().state_dict()},
                "loss_scaler": {"scale": torch.ones(1)},
            },
            ["loss_scaler", "net.encoder"],
        ),
        ({"python": (3, (1, 2)), "cpu": torch.get_rng_state()}, [""]),
        ([torch.ones(3), torch.ones(2)], [""]),
        (MOMENTS, []),
        (argparse.Namespace(lr=1), []),
    ],
    ids=["config", "args", "nested", "in config", "scaler", "random", "list", "moments", "none"],
)
def test_a_few_tensors_are_not_taken_for_a_network(
    root: object, keys: list[str], tmp_path: Path
) -> None:
    message = refusal(root, tmp_path)
    assert "no weights in a usual place; " in message
    assert "; it holds: " in message
    assert keys_in(message) == keys
    for key in keys:
        assert report(root, tmp_path, key=key).tensors


def test_an_optimizer_is_no_second_network(tmp_path: Path) -> None:
    root = {"weights": network().state_dict(), "opt": MOMENTS, "epoch": 3}
    network().load_state_dict(taken(root, tmp_path))


def test_a_bare_tensor_is_named(tmp_path: Path) -> None:
    assert "a bare tensor of shape (3, 4)" in refusal(torch.ones(3, 4), tmp_path)


def test_a_key_that_a_terminal_would_obey_is_written_so_that_a_shell_understands_it(
    tmp_path: Path,
) -> None:
    key = "a b\n\x1b[2J'\\"
    message = refusal({key: network().state_dict(), "other": network()}, tmp_path)
    assert message.isprintable()
    assert r"--key $'a b\n\x1b[2J\'\\' (dict of 7)" in message


def test_modules_that_contain_one_another_without_end_are_refused(tmp_path: Path) -> None:
    """Each of the thirty holds the next one twice."""
    module: nn.Module = nn.Linear(1, 1)
    for _ in range(30):
        module = nn.Sequential(module, module)
    message = refusal(module, tmp_path)  # outside of the assertion, which would print the module
    assert "repeats itself more often than any checkpoint does" in message
    shared = nn.Linear(2, 2)
    assert len(taken(nn.Sequential(*[shared] * 12), tmp_path)) == 24


def test_an_object_that_holds_a_network_is_searched(tmp_path: Path) -> None:
    learner = argparse.Namespace(model=network(), lr=0.1)
    network().load_state_dict(taken(learner, tmp_path))


def test_a_state_dict_may_hold_what_is_plain(tmp_path: Path) -> None:
    state = OrderedDict(network().state_dict(), version=3, author="x", classes=["a"])
    state["head._extra_state"] = {"scale": 1}
    assert taken(state, tmp_path).keys() == network().state_dict().keys()
