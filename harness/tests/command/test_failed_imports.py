"""A package that is missing, or whose import raises, is named in one to three lines."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness import UserError, targets
from harness.testing import command as typed
from tests.command.test_answers import run
from tests.conftest import ROOT
from tests.training.test_owner_mistakes import RIGHT

NMS = "raise RuntimeError('operator torchvision::nms does not exist')\n"


def install(folder: Path, **modules: str) -> str:
    """Write packages that take the place of installed ones, and return their folder."""
    for name, text in modules.items():
        path = folder / "site-packages" / name / "__init__.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return str(folder / "site-packages")


def test_broken_package_that_the_library_imports_is_named(tmp_path: Path) -> None:
    """Torch itself, or torchvision, which torchmetrics imports if it is installed."""
    for packages, first, cure in (
        ({"torch": "raise ImportError('libcudart.so.12: no such file')"},
         "cannot be imported: ImportError: libcudart.so.12: no such file",
         "Install torch again: pip install --force-reinstall torch=="),
        ({"torch": "", "torchmetrics": "import torchvision", "torchvision": NMS},
         "torchvision cannot be imported: RuntimeError: operator torchvision::nms does not exist",
         "or remove it from requirements.txt and type: pip uninstall torchvision"),
    ):  # fmt: skip
        folder = install(tmp_path / str(len(packages)), **packages)
        words = [str(ROOT / "train.py"), f"output_dir={tmp_path}", "strategy=cpu"]
        said = typed(*words, environment={"PYTHONPATH": folder}).stderr
        assert first in said
        assert cure in said
        assert len(said.splitlines()) <= 3


def test_broken_package_of_a_users_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = install(tmp_path, opened=NMS)
    text = f"import sys\nsys.path.insert(0, {folder!r})\nimport opened\n{RIGHT}"
    said = run(tmp_path, text).stderr
    assert said.startswith("mine.py:3: RuntimeError: operator torchvision::nms does not exist\n")
    assert "or remove it from requirements.txt and type: pip uninstall opened" in said
    assert len(said.splitlines()) <= 3


@pytest.mark.parametrize(
    ("module", "cure"),
    [
        (
            "wanted",
            "Add wanted to requirements.txt and type make train, or type: pip install wanted",
        ),
        ("cv2.aruco", "Add opencv-python to requirements.txt and type make train"),
        ("mine.parts", "HYDRA_FULL_ERROR=1"),  # no package is missing
    ],
)
def test_module_that_a_users_file_lacks_is_answered_by_its_package(
    module: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, line in ((f"import {module}\n{RIGHT}", 1), (late(module), 48)):
        said = run(tmp_path, text).stderr
        assert said.startswith(f"mine.py:{line}")
        assert cure in said
        assert len(said.splitlines()) <= 3


def late(module: str) -> str:
    """A module that imports while it trains."""
    step = "        x, y = batch\n        loss"
    assert step in RIGHT
    return RIGHT.replace(step, f"        import {module}\n{step}")


def test_package_that_a_yaml_file_names_is_answered(tmp_path: Path) -> None:
    for target, cure in (
        (
            "wanted.Net",
            "model._target_: wanted.Net does not exist.\nAdd wanted to requirements.txt",
        ),
        ("torhc.nn.Linear", "torhc.nn.Linear does not exist. Did you mean torch?"),
        ("src.models.Net", "model._target_: src.models.Net: write small in place of src."),
    ):
        cfg = OmegaConf.create({"model": {"_target_": target}})
        targets.load_rules(ROOT / "conf")
        with pytest.raises(UserError, match=r"does not exist|in place of") as told:
            list(targets.import_targets(cfg))
        assert cure in str(told.value)
