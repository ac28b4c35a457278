"""A public package's own exception is told in a few lines: nobody here has written its code."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from harness.exact.seeded_steps import SeededSteps
from harness.run import mistakes, train

PACKAGE = """
from torch import nn
from pytorch_lightning.demos.boring_classes import BoringModel

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        return self.loss_of(batch)

    def loss_of(self, batch):
        raise KeyError("target")

class Failing(BoringModel):
    def training_step(self, batch, batch_idx):
        return nn.functional.linear(batch, batch.new_zeros(2, 31)).sum()

class Finds(BoringModel):
    def training_step(self, batch, batch_idx):
        next(c for c in self.trainer.callbacks if type(c).__name__ == "SeededSteps").fail()
"""


def test_line_of_the_package_is_named_and_a_bug_of_the_harness_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_cfg: Callable[..., DictConfig]
) -> None:
    """Also where torch has raised it."""
    path = tmp_path / "site-packages" / "public" / "models.py"
    path.parent.mkdir(parents=True)
    (path.parent / "__init__.py").touch()
    path.write_text(PACKAGE)
    monkeypatch.syspath_prepend(path.parents[1])
    monkeypatch.delitem(sys.modules, "public", raising=False)
    names: dict[str, Callable[..., None]] = {}
    source = "def fail(self):\n    raise KeyError('ours')\n"
    exec(compile(source, str(sys.modules[SeededSteps.__module__].__file__), "exec"), names)
    monkeypatch.setattr(SeededSteps, "fail", names["fail"], raising=False)
    cfg = make_cfg("data=synthetic", "watch=none", "logger=none", "strategy=cpu")
    OmegaConf.set_struct(cfg, False)
    cfg.trainer.max_epochs, cfg.trainer.enable_progress_bar, cfg.checkpoint = 1, False, None
    cfg.data = {"_target_": "pytorch_lightning.demos.boring_classes.BoringDataModule"}
    for model, place, says in (
        ("Model", ":10 in loss_of", "KeyError: 'target'"),
        ("Failing", ":14 in training_step", "RuntimeError: mat1 and mat2 shapes"),
        ("Finds", "", ""),
    ):
        cfg.callbacks, cfg.model = {}, {"_target_": f"public.models.{model}"}
        with pytest.raises((KeyError, RuntimeError)) as raised:
            train.train(cfg)
        message = mistakes.of_owner(raised.value)
        if not says:
            assert message is None
            continue
        assert message is not None
        first, *rest = message.splitlines()
        assert first.startswith(f"{path}{place}: {says}"), message
        assert "run.log (HYDRA_FULL_ERROR=1 prints it)." in rest[-1]
        assert len(rest) <= 2
