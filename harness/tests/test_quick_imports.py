"""Imports are not slowed by garbage collection, and a torchvision that breaks them is named."""

import gc
from pathlib import Path

import pytest

from harness.quick_imports import quick_imports
from harness.testing import command


def test_a_torchvision_of_another_torch_is_named_in_two_lines(tmp_path: Path) -> None:
    """It breaks inside of torchmetrics' import, which Lightning's begins with."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('no nms')\n")
    (tmp_path / "torchvision-0.20.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.20.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.20.1\n"
    )
    words = ["train.py", "data=synthetic", f"output_dir={tmp_path}/runs"]
    result = command(*words, environment={"PYTHONPATH": f"src:{tmp_path}"})
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert first.startswith("torchvision cannot be imported, as if it were built for another torch")
    assert "RuntimeError: no nms" in first
    assert second.startswith("Type pip uninstall torchvision")
    assert not [*tmp_path.glob("runs/*")]


def test_garbage_collection_is_off_during_imports_and_then_as_before() -> None:
    """Also after one that fails; and what an owner's program holds by then may still go."""
    was_on, num_frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        for is_on in (True, False):
            gc.enable() if is_on else gc.disable()
            seen: list[bool] = []
            with pytest.raises(IndexError), quick_imports():
                seen.append(gc.isenabled()) or seen[1]
            assert seen == [False]
            assert gc.isenabled() == is_on
    finally:
        gc.enable() if was_on else gc.disable()
    assert gc.get_freeze_count() == num_frozen


def test_a_start_imports_no_torch_and_later_collections_leave_it_out() -> None:
    code = "import harness, sys; from harness.command import main; print('torch' in sys.modules)"
    code += "; from harness import DataModule; import gc; print(gc.isenabled())"
    has_torch, is_on, num_frozen = command(
        "-c", f"{code}; print(gc.get_freeze_count())"
    ).stdout.split()
    assert (has_torch, is_on) == ("False", "True")
    assert int(num_frozen) > 100_000
