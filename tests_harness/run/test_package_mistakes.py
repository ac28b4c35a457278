"""A public package's own exception is told in a few lines: nobody here has written its code."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from harness.run import mistakes, tasks

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
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package, ``public``."""
    folder = tmp_path / "site-packages" / "public"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "models.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder.parent)
    for name in ("public", "public.models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def failure(make_cfg: Callable[..., DictConfig], model: str) -> Exception:
    """What training raises."""
    cfg = make_cfg("data=synthetic", "watch=none", "logger=none", "strategy=cpu")
    OmegaConf.set_struct(cfg, False)
    cfg.trainer.max_epochs, cfg.trainer.enable_progress_bar, cfg.checkpoint = 1, False, None
    cfg.callbacks, cfg.model = {}, {"_target_": model}
    cfg.data = {"_target_": "pytorch_lightning.demos.boring_classes.BoringDataModule"}
    with pytest.raises((KeyError, RuntimeError)) as raised:
        tasks.train(cfg)
    return raised.value


def test_line_of_the_package_is_named(package: Path, make_cfg: Callable[..., DictConfig]) -> None:
    """Also where torch has raised it."""
    for model, place, says in (
        ("Model", ":10 in loss_of", "KeyError: 'target'"),
        ("Failing", ":14 in training_step", "RuntimeError: mat1 and mat2 shapes"),
    ):
        message = mistakes.of_owner(failure(make_cfg, f"public.models.{model}"))
        assert message is not None
        first, *rest = message.splitlines()
        assert first.startswith(f"{package / 'models.py'}{place}: {says}"), message
        assert "run.log (HYDRA_FULL_ERROR=1 prints it)." in rest[-1]
        assert len(rest) <= 2


def test_exception_inside_of_the_harness_keeps_its_traceback(
    package: Path, make_cfg: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module's line below it does not make a bug of ours the package's."""
    from harness.exact.seeded_steps import SeededSteps

    text = (package / "models.py").read_text()
    call = "next(c for c in self.trainer.callbacks if type(c).__name__ == 'SeededSteps').fail()"
    (package / "models.py").write_text(text.replace('raise KeyError("target")', call))
    source = "def fail(self):\n    raise KeyError('ours')\n"
    file, names = sys.modules[SeededSteps.__module__].__file__, {}
    exec(compile(source, str(file), "exec"), names)
    monkeypatch.setattr(SeededSteps, "fail", names["fail"], raising=False)
    assert mistakes.of_owner(failure(make_cfg, "public.models.Model")) is None
