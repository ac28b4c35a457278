"""Which weights of a file fit a module, and what a refusal says to type."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.errors import UserError
from harness.init.settings import read_init
from harness.init.weights import start_from
from tests.init.modules import FineTuned, network


def started(folder: Path, state: Any, **values: Any) -> tuple[FineTuned, dict[str, str], list[str]]:
    """Write a state to a file, and start from it: the module, its rows and its lines."""
    module, path = FineTuned(), folder / "weights.pt"
    torch.save(state, path)
    return module, *start_from(module, read_init({"path": str(path), **values}))


def refusal(folder: Path, state: Any, **values: Any) -> str:
    with pytest.raises(UserError) as caught:
        started(folder, state, **values)
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def test_a_head_of_another_size_is_left_out_when_asked(tmp_path: Path) -> None:
    state = network(num_classes=10).state_dict()
    text = refusal(tmp_path, state)
    assert "7 of the 9 tensors of net fit" in text
    sizes = "is (10, 8) in the file, (3, 8) in the module"
    assert f"fit. net.head.weight {sizes}, net.head.bias is (10,) in the file" in text
    assert "Leave them out with init.leave_out=[net.head], or set init.strict=false." in text
    text = refusal(tmp_path, state, leave_out=["net.haed"])
    assert text == "init.leave_out=['net.haed']: no part is named net.haed. Did you mean net.head?"
    module, rows, _ = started(tmp_path, state, leave_out=["net.head"])
    assert rows["fits"] == "7 of the 7 tensors of net"
    assert rows["left out"] == "net.head.weight, net.head.bias"
    assert torch.equal(module.net.backbone[0].weight, state["backbone.0.weight"])
    _, rows, lines = started(tmp_path, state, strict=False)
    assert rows["fits"] == "7 of the 9 tensors of net"
    assert f"net.head.weight {sizes}" in rows["does not fit"]
    assert "not loaded: net.head.bias is (10,) in the file, (3,) in the module" in lines


def test_what_only_one_side_has_is_refused_with_its_name(tmp_path: Path) -> None:
    state = network().state_dict()
    del state["backbone.0.bias"]
    state["aux.weight"] = torch.ones(2, 2)
    text = refusal(tmp_path, state)
    assert "net.backbone.0.bias is not in the file" in text
    assert "net.aux.weight is only in the file" in text
    assert "init.leave_out=[net.aux,net.backbone.0.bias]" in text
    rows = started(tmp_path, state, leave_out=["net.backbone.0.bias", "net.aux"])[1]
    assert rows["fits"] == "8 of the 8 tensors of net"


def test_the_part_that_takes_the_weights_is_found(tmp_path: Path) -> None:
    state = network().state_dict()
    module, rows, lines = started(tmp_path, {f"module.{name}": v for name, v in state.items()})
    assert rows["fits"] == "9 of the 9 tensors of net"
    assert torch.equal(module.net.head.weight, state["head.weight"])
    assert "loaded net.head.weight <- module.head.weight" in lines
    backbone = network()[0].state_dict()
    module, rows, _ = started(tmp_path, backbone)
    assert rows["fits"] == "7 of the 7 tensors of net.backbone"
    assert torch.equal(module.net.backbone[0].weight, backbone["0.weight"])
    tied = FineTuned()
    tied.again = tied.net.head  # a file has these under one of their names
    torch.save({f"net.{name}": value for name, value in state.items()}, tmp_path / "tied.pt")
    start_from(tied, read_init({"path": str(tmp_path / "tied.pt")}))
    assert torch.equal(tied.again.weight, state["head.weight"])
    compiled = FineTuned()
    compiled.net = nn.ModuleDict({"_orig_mod": compiled.net})  # named as by torch.compile
    rows, _ = start_from(compiled, read_init({"path": str(tmp_path / "tied.pt")}))
    assert rows["fits"] == "9 of the 9 tensors of the module"


def test_floating_types_are_cast_and_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    state = network().half().state_dict()
    module = started(tmp_path, state)[0]
    assert torch.equal(module.net.head.weight, state["head.weight"].float())
    state["head.weight"] = torch.ones(3, 8, dtype=torch.int64)
    assert "is torch.int64 in the file, torch.float32 in" in refusal(tmp_path, state)


def test_names_are_exchanged(tmp_path: Path) -> None:
    state = network().state_dict()
    other = {f"bert.{name.replace('head', 'fc')}": value for name, value in state.items()}
    module, rows, lines = started(tmp_path, other, rename={"bert": None, "bert.fc": "head"})
    assert rows["fits"] == "9 of the 9 tensors of net"
    assert "loaded net.head.weight <- bert.fc.weight" in lines
    assert torch.equal(module.net.head.weight, state["head.weight"])
    assert "no part is named haed. Did you mean head?" in refusal(
        tmp_path, state, rename={"haed": "a"}
    )
    names = {"head": "backbone.0"}
    assert "gives two tensors of the file the same name" in refusal(tmp_path, state, rename=names)


def test_a_file_of_other_weights_or_of_several_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, nn.Linear(4, 4).state_dict(), strict=False)
    assert "0 of the 2 tensors of net.head fit. net.head.weight is (4, 4)" in text
    assert "Rename parts with init.rename={old:new}, or choose a part of the file with" in text
    both = {"student": network().state_dict(), "teacher": network().state_dict()}
    text = refusal(tmp_path, both)
    assert "student, teacher. Choose one of them with init.key=NAME" in text
    assert "--" not in text
    module = started(tmp_path, both, key="teacher")[0]
    assert torch.equal(module.net.head.weight, both["teacher"]["head.weight"])
