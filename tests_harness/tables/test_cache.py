"""A large table is encoded once, by one process; what was not finished is never used."""

import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from harness import UserError
from harness.tables import table
from harness.tables.cache import cached
from harness.tables.table import Table
from tests_harness.tables.test_table import houses, rows, written


def cached_houses(folder: Path, **kwargs) -> Table:
    return houses(
        str(folder / "houses.csv"), cache_megabytes=0, cache_dir=str(folder / "cache"), **kwargs
    )


def test_second_start_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    first = cached_houses(tmp_path)
    known = first.make_dataset("train").__getitems__([0, 5])
    plain = houses(str(tmp_path / "houses.csv")).make_dataset("train").__getitems__([0, 5])
    assert all(torch.equal(a, b) for a, b in zip(known, plain, strict=True))
    with monkeypatch.context() as patch:
        patch.setattr(table, "read_table", None)
        again = cached_houses(tmp_path)
        found = again.make_dataset("train")
        assert isinstance(found.inputs, np.memmap)
        assert all(
            torch.equal(a, b) for a, b in zip(found.__getitems__([0, 5]), known, strict=True)
        )
        assert again.facts == first.facts
    # A file that was written again, and other settings, are other arrays.
    written(tmp_path, rows(61))
    assert cached_houses(tmp_path).facts["num_rows"] == 61
    assert cached_houses(tmp_path, ignore=["city"]).facts["cardinalities"] == [3]
    assert cached_houses(tmp_path, split_seed=1).facts != cached_houses(tmp_path).facts


def made_slowly(folder: Path) -> None:
    def make() -> dict[str, np.ndarray]:
        (folder / f"made by {os.getpid()}").touch()
        time.sleep(0.3)
        return {"x": np.arange(5)}

    assert cached(folder / "cache", "key", ["x"], make)["x"].tolist() == [0, 1, 2, 3, 4]


def test_one_of_several_processes_makes_it(tmp_path: Path) -> None:
    processes = [get_context("fork").Process(target=made_slowly, args=(tmp_path,)) for _ in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("made by *"))) == 1


def killed_between_files(folder: Path) -> None:
    write = np.lib.format.write_array

    def write_and_die(file, array, **kwargs) -> None:
        if array.ndim == 2:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write(file, array, **kwargs)

    np.lib.format.write_array = write_and_die
    cached(folder, "key", ["x", "y"], lambda: {"x": np.zeros(3), "y": np.zeros((2, 2))})


def test_killed_process_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    process = get_context("fork").Process(target=killed_between_files, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.glob("*.part"))
    found = cached(tmp_path, "key", ["x", "y"], lambda: {"x": np.ones(3), "y": np.ones((2, 2))})
    assert found["x"].tolist() == [1, 1, 1]
    assert found["y"].sum() == 4
    assert not list(tmp_path.glob("*.part"))


def test_full_disk_and_folders_of_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    written(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "write_array", full)
        with pytest.raises(UserError, match=r"has no room.\nName another folder"):
            _ = cached_houses(tmp_path).facts
    left = (tmp_path / "cache" / "tables").iterdir()
    assert {path.suffix for path in left} == {".lock"}
    (tmp_path / "a_file").touch()
    data = houses(
        str(tmp_path / "houses.csv"), cache_megabytes=0, cache_dir=str(tmp_path / "a_file")
    )
    with pytest.raises(UserError, match=r"data.cache_dir=.* cannot be written: Not a directory"):
        _ = data.facts
