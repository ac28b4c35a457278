"""What fits where, what is refused, and what the refusal says to type."""

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.errors import UserError
from harness.init.settings import settings
from harness.init.weights import Started, start_from
from tests.init.modules import FineTuned, network

State = dict[str, Tensor]


def saved(folder: Path, state: Any, name: str = "weights.pt") -> Path:
    torch.save(state, folder / name)
    return folder / name


def started(path: Path, module: pl.LightningModule | None = None, **values: Any) -> Started:
    return start_from(module or FineTuned(), settings({"path": str(path), **values}))


def refusal(path: Path, module: pl.LightningModule | None = None, **values: Any) -> str:
    with pytest.raises(UserError) as caught:
        started(path, module, **values)
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Weights of the network, as torchvision's and timm's files are."""
    save_file(network().state_dict(), tmp_path / "whole.safetensors")
    return tmp_path / "whole.safetensors"


@pytest.fixture
def of_ten(tmp_path: Path) -> Path:
    """Weights of the network for ten classes."""
    save_file(network(num_classes=10).state_dict(), tmp_path / "ten.safetensors")
    return tmp_path / "ten.safetensors"


def test_a_head_of_another_size_is_left_out_when_asked(of_ten: Path) -> None:
    module = FineTuned()
    before, head = copy.deepcopy(module.state_dict()), copy.deepcopy(module.net.head.state_dict())
    text = refusal(of_ten, module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert "7 of the 9 tensors of net fit" in text
    assert "2 of another shape: net.head.weight (10, 8), here (3, 8)" in text
    assert "Type init.leave_out=[net.head] to go without these, or init.strict=false." in text
    found = started(of_ten, module, leave_out=["net.head"])
    assert found.rows["fits"] == "7 of 7 tensors of net"
    assert found.rows["left out"] == "net.head.weight, net.head.bias"
    assert all(torch.equal(value, head[key]) for key, value in module.net.head.state_dict().items())
    not_strict = started(of_ten, strict=False)
    assert not_strict.rows["fits"] == "7 of 9 tensors of net"
    assert "another shape: net.head.weight (10, 8), here (3, 8)" in not_strict.lines


def test_what_only_one_side_has_is_refused_with_its_name(tmp_path: Path) -> None:
    state = network().state_dict()
    del state["backbone.0.bias"]
    state["aux.weight"] = torch.ones(2, 2)
    path = saved(tmp_path, state)
    text = refusal(path)
    assert "1 not in the file: net.backbone.0.bias" in text
    assert "1 only in the file: net.aux.weight" in text
    assert "init.leave_out=[net.backbone.0.bias,net.aux]" in text
    found = started(path, leave_out=["net.backbone.0.bias", "net.aux"])
    assert found.rows["fits"] == "8 of 8 tensors of net"


def test_names_are_mapped_as_offered_and_a_part_of_the_network_is_found(tmp_path: Path) -> None:
    state = network().state_dict()
    path = saved(tmp_path, {n.replace("head", "fc"): value for n, value in state.items()})
    assert "Type init.map={fc:head} if these are the same." in refusal(path)
    module = FineTuned()
    found = started(path, module, map={"fc": "head"})
    assert found.rows["fits"] == "9 of 9 tensors of net"
    assert torch.equal(module.net.head.weight, state["head.weight"])
    assert "took net.head.weight <- fc.weight" in found.lines
    backbone = network()[0]
    module = FineTuned()
    fits = started(saved(tmp_path, backbone.state_dict()), module).rows["fits"]
    assert fits == "7 of 7 tensors of net.backbone"
    assert torch.equal(module.net.backbone[0].weight, backbone[0].weight)


def test_settings_that_name_what_is_not_there_are_refused(whole: Path) -> None:
    text = refusal(whole, map={"haed": "fc"})
    assert text == "init.map={haed:fc}: nothing in the file is called haed. Did you mean head?"
    text = refusal(whole, leave_out=["net.haed"])
    assert text == "init.leave_out=[net.haed]: there is no net.haed. Did you mean net.head?"
    assert "init.into=net.backbon: there is no net.backbon." in refusal(whole, into="net.backbon")


def test_other_floating_types_are_cast_and_told_and_whole_numbers_are_no_weights(
    tmp_path: Path,
) -> None:
    state, module = network().half().state_dict(), FineTuned()
    found = started(saved(tmp_path, state), module)
    assert found.rows["fits"] == "9 of 9 tensors of net, 8 cast from float16 to float32"
    assert module.net.head.weight.dtype == torch.float32
    assert torch.equal(module.net.head.weight, state["head.weight"].float())
    state["head.weight"] = torch.ones(3, 8, dtype=torch.int64)
    assert "net.head.weight int64, here float32" in refusal(saved(tmp_path, state))


def test_what_holds_no_weights_that_fit_is_refused(tmp_path: Path) -> None:
    text = refusal(saved(tmp_path, nn.Linear(4, 4).state_dict()))
    assert "none of its 2 tensors fits" in text
    assert "The file has weight, bias; the module has net, net.backbone, net.head." in text
    assert "init.prefix=<part> takes a part of the file, init.map={old: new} renames." in text
    assert "no weights in a usual place" in refusal(saved(tmp_path, {"epoch": 3}))


def test_several_entries_are_refused_with_the_key_to_type(tmp_path: Path) -> None:
    student, teacher = network().state_dict(), network().state_dict()
    path = saved(tmp_path, {"student": student, "teacher": teacher})
    text = refusal(path)
    assert "init.key=student" in text
    assert "--" not in text
    module = FineTuned()
    started(path, module, key="teacher")
    assert torch.equal(module.net.head.weight, teacher["head.weight"])
