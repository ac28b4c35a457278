"""An ``on_load_checkpoint`` finds its own objects, and nothing of the file is executed."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from harness.checkpoints.live_objects import put_live_objects
from harness.checkpoints.reading import read


class Scaler:
    """An object that a checkpoint names and that is not built."""


def loaded(tmp_path: Any, checkpoint: dict[str, Any], **module: Any) -> dict[str, Any]:
    torch.save(checkpoint, tmp_path / "a.ckpt")
    found = read(tmp_path / "a.ckpt")
    owner = SimpleNamespace(hparams=module.pop("hparams", {}), **module)
    trainer: Any = SimpleNamespace(lightning_module=owner, datamodule=None)
    put_live_objects(found, trainer)
    return found


def test_saved_objects_become_those_of_the_module(tmp_path: Any) -> None:
    saved, live = Scaler(), Scaler()
    parts = OrderedDict(scaler=saved, list=[1, saved])
    found = loaded(
        tmp_path,
        {"hyper_parameters": {"parts": parts, "width": 3}, "special": {"scaler": saved}},
        hparams={"parts": {"scaler": live, "list": [1, live]}, "width": 3},
    )
    assert found["hyper_parameters"]["parts"]["scaler"] is live
    assert found["hyper_parameters"]["parts"]["list"][1] is live
    assert found["special"]["scaler"] is live  # the same object was saved there


def test_an_attribute_serves_where_the_hyper_parameter_is_not_kept(tmp_path: Any) -> None:
    loss = nn.L1Loss()
    found = loaded(tmp_path, {"hyper_parameters": {"loss": nn.L1Loss()}}, loss=loss)
    assert found["hyper_parameters"]["loss"] is loss
