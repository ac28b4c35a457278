from pathlib import Path

import numpy as np
import pytest

from harness import UserError, train
from project.data.arrays import Arrays


def saved(folder: Path, **arrays: np.ndarray) -> dict[str, str]:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return {name: str(folder / f"{name}.npy") for name in arrays}


def test_arrays_of_classes_and_of_numbers_train(tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).standard_normal((60, 3, 2)).astype("float32")
    files = saved(tmp_path, x=inputs, labels=np.arange(60) % 3, sizes=inputs.sum((1, 2)))
    for model, targets, result in (
        ("table_mlp", "labels", "test/accuracy"),
        ("regressor", "sizes", "test/mae"),
    ):
        run = train(
            *("data=arrays", f"data.inputs={files['x']}", f"data.targets={files[targets]}"),
            *(f"model={model}", "trainer.max_epochs=1", "trainer.log_every_n_steps=1"),
            *("strategy=cpu", "trainer.enable_progress_bar=false", "logger=none"),
            f"output_dir={tmp_path / model}",
        )
        assert result in run.results


def test_mistakes_are_told_in_lines(tmp_path: Path) -> None:
    inputs = np.ones((20, 3), "float32")
    for arrays, message in (
        ({"inputs": inputs, "targets": np.arange(19) % 2}, "targets must be integers"),
        ({"inputs": inputs, "targets": np.arange(20) - 1}, "integers from 0"),
        ({"inputs": inputs, "targets": np.array(["a"] * 20)}, "the type <U1"),
    ):
        with pytest.raises(UserError, match=message):
            Arrays(**saved(tmp_path, **arrays), batch_size=4).infer_facts()
    (tmp_path / "inputs.npy").write_bytes(b"no array")
    with pytest.raises(UserError, match=r"cannot be read as \.npy"):
        Arrays(
            str(tmp_path / "inputs.npy"), str(tmp_path / "targets.npy"), batch_size=4
        ).infer_facts()
