"""``lightning.pytorch`` and ``pytorch_lightning`` are one package, whichever is imported."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# The imports of a public module, in all orders.
IMPORTS = """
import harness, sys
assert not {'torch', 'lightning', 'pytorch_lightning'} & {*sys.modules}
from importlib.util import find_spec
assert find_spec("lightning") and find_spec("lightning.pytorch")
assert not find_spec("lightning.pytorch.nothing")
from lightning.pytorch.callbacks.early_stopping import EarlyStopping
from lightning.fabric.utilities.seed import seed_everything
import lightning as L
import lightning.pytorch as pl
import pytorch_lightning
import pytorch_lightning.callbacks.early_stopping as real
assert EarlyStopping is real.EarlyStopping and sys.modules[
    "lightning.pytorch.callbacks.early_stopping"
] is real
assert real.__name__ == real.__spec__.name == "pytorch_lightning.callbacks.early_stopping"
assert pl is L.pytorch is pytorch_lightning and pl.__spec__.name == "pytorch_lightning"
assert L.LightningModule is pytorch_lightning.LightningModule and L.Trainer is pl.Trainer
assert L.fabric.Fabric is L.Fabric and L.seed_everything is pl.seed_everything
assert L.fabric.__name__ == "lightning_fabric" and L.__version__
"""
MISSING = """
try:
    from lightning import nothing
except ImportError as error:
    assert "cannot import name 'nothing' from 'lightning'" in str(error), error
else:
    assert False
"""
# As the distribution begins: its top module imports its own copy.
TOP = "from lightning.pytorch import LightningModule, Trainer\n"
TOP += "from lightning.fabric import Fabric, seed_everything\n__version__ = 'copy'\n"


def python(text: str, *places: Path) -> str:
    """Run a program that finds packages in further places first; its errors."""
    start = f"import sys\nsys.path[:0] = {[str(place) for place in places]}\n"
    return subprocess.run(
        [sys.executable, "-c", start + text], capture_output=True, text=True, check=False
    ).stderr


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A place where a distribution ``lightning`` is, whose copy has classes of its own."""
    files = {
        "__init__.py": TOP,
        "data.py": "mine = 1\n",
        "pytorch/__init__.py": "class LightningModule: pass\nTrainer = LightningModule\n",
        "fabric/__init__.py": "Fabric = seed_everything = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "lightning" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.ci
@pytest.mark.skipif(find_spec("lightning.data") is not None, reason="lightning is installed")
def test_without_the_package_both_names_are_one() -> None:
    assert python(IMPORTS + MISSING) == ""


@pytest.mark.slow
def test_with_the_package_both_names_are_one_and_the_rest_is_its_own(installed: Path) -> None:
    text = "from lightning.data import mine\nassert L.__version__ == 'copy'\n"
    assert python(IMPORTS + text, installed) == ""


@pytest.mark.slow
def test_copy_that_was_imported_before_is_warned_of(installed: Path) -> None:
    """A notebook that has imported it has modules that no Trainer here takes."""
    text = """
import lightning.pytorch as pl
import harness
class Model(pl.LightningModule): pass
from harness.training.check_targets import check_kinds
check_kinds(Model(), None, [], [])
"""
    errors = python(text, installed)
    assert "model: __main__.Model is not a LightningModule." in errors
    assert "was imported before harness. Import harness first" in errors
