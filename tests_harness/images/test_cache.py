"""Packed once, whole or not at all, whoever is killed and whatever the disk says."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from harness import UserError
from harness.images import cache, packing
from harness.images.cache import Lock, Packed, lock_of, packed
from harness.images.decoding import decode
from harness.images.finding import find_files
from harness.testing import clean_environment
from tests_harness.images.made import data, write_images
from tests_harness.run.test_small_disks import may_mount

__all__ = ["clean_environment"]

SIDE = 12
PACK = (
    "import sys; from pathlib import Path; from harness.images.finding import find_files; "
    "from harness.images.cache import packed; "
    f"packed(find_files(sys.argv[1], 'data.root'), Path(sys.argv[2]), {SIDE}, 3)"
)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pets", num=4)


def pack(root: Path, side: int = SIDE, **settings: bool) -> Packed:
    return packed(find_files(root, "data.root"), root.parent / "cache", side, 3, **settings)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def started(root: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PACK, str(root), str(root.parent / "cache")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_pixels_are_those_of_the_files_in_their_order(pets: Path) -> None:
    found = pack(pets)
    assert found.path is not None
    images = np.fromfile(found.path, np.uint8).reshape(-1, SIDE, SIDE, 3)
    files = find_files(pets, "data.root")
    assert len(images) == len(files.names) == 12
    for image, name in zip(images, files.names, strict=True):
        assert np.array_equal(image, decode(pets / name, SIDE, 3))
    index = json.loads((found.path.parent / "index.json").read_text())
    assert index | {"root": str(pets), "num_images": 12, "side": SIDE} == index
    listed = json.loads((found.path.parent / "files.json").read_text())
    assert listed == [files.names, files.sizes.tolist(), files.times.tolist()]


def test_second_use_decodes_nothing(pets: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    first = pack(pets)
    said = capsys.readouterr().out
    assert "Packing 12 images" in said
    assert "per second" in said
    monkeypatch.setattr(cache, "decode_all", None)
    again = pack(pets)
    assert (again.path, again.unreadable) == (first.path, first.unreadable)
    assert capsys.readouterr().out == ""
    moved = pets.rename(pets.with_name("moved"))  # where the files lie does not matter
    assert cache.key_of(find_files(moved, ""), {}) == cache.key_of(find_files(moved, ""), {})


@pytest.mark.parametrize("change", ["changed", "touched", "added", "removed", "renamed"])
def test_other_files_are_noticed_and_the_outdated_cache_removed(
    change: str, pets: Path, capsys
) -> None:
    old = pack(pets).path
    assert old is not None
    file = pets / "cat" / "001.jpg"
    if change == "changed":
        shutil.copy(pets / "dog" / "002.jpg", file)
    elif change == "touched":  # of the same size: only its time tells
        os.utime(file, ns=(1, 1))
    elif change == "added":
        shutil.copy(file, pets / "cat" / "new.jpg")
    elif change == "removed":
        file.unlink()
    else:
        file.rename(pets / "cat" / "other.jpg")
    new = pack(pets).path
    assert new is not None
    assert new != old
    assert names(pets.parent / "cache") == {new.parent.name}
    assert f"Removed {old.parent}" in capsys.readouterr().out


def test_cache_that_is_used_is_not_removed(pets: Path, capsys) -> None:
    used = pack(pets)
    assert used.path is not None
    os.utime(pets / "cat" / "001.jpg", ns=(1, 1))
    pack(pets)
    assert used.path.exists()
    assert f"to remove by hand: {used.path.parent} (0 MB)" in capsys.readouterr().out


def test_caches_of_other_settings_stay_and_are_named(pets: Path, capsys) -> None:
    first = pack(pets).path
    assert first is not None
    second = pack(pets, side=14).path
    assert second is not None
    assert names(pets.parent / "cache") == {first.parent.name, second.parent.name}
    assert f"to remove by hand: {first.parent}" in capsys.readouterr().out


def test_files_that_cannot_be_read_are_remembered(pets: Path) -> None:
    (pets / "cat" / "002.jpg").write_bytes(b"no image")
    for keeps_pixels in (True, False):
        for _ in range(2):
            found = pack(pets, keeps_pixels=keeps_pixels)
            assert found.unreadable == {6: "no image that Pillow can read"}
            assert (found.path is not None) == keeps_pixels


@pytest.mark.parametrize("moment", [0.0, 0.3, 0.6, 0.9])
def test_killed_packing_leaves_nothing_that_looks_complete(moment: float, tmp_path: Path) -> None:
    """Its processes end with it, and the next start sweeps what it has left."""
    pets = write_images(tmp_path / "pets", num=150)
    folder = tmp_path / "cache"
    process = started(pets)
    size = 450 * SIDE * SIDE * 3
    while process.poll() is None:  # until so much of it is written
        with suppress(OSError, StopIteration):
            part = next(folder.glob(".*.part/pixels.uint8"))
            if np.count_nonzero(np.fromfile(part, np.uint8)) >= moment * size:
                break
        time.sleep(0.001)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert {name[0] for name in names(folder)} == {"."}  # hidden: not complete
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < end:
        time.sleep(0.01)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    other = write_images(tmp_path / "other", num=2)  # any start sweeps
    (home,) = {pack(other).path.parent.name}  # type: ignore[union-attr]
    assert names(folder) == {home}


def test_of_several_processes_one_packs_and_the_others_wait(tmp_path: Path) -> None:
    pets = write_images(tmp_path / "pets", num=100)
    processes = [started(pets) for _ in range(3)]
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert sum("files/s" in out or "per second" in out for out, _ in said) == 1
    assert len(names(tmp_path / "cache")) == 1


def test_what_a_killed_removal_leaves_is_packed_again(pets: Path) -> None:
    found = pack(pets)
    assert found.path is not None
    (found.path.parent / "index.json").unlink()
    del found.lock
    again = pack(pets).path
    assert again == found.path
    assert (again.parent / "index.json").exists()


@pytest.mark.parametrize("died", ["kill", "exit"])
def test_worker_that_dies_is_told(died: str, pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(worker: "subprocess.Popen[str]", *rest: object) -> object:
        if died == "kill":
            worker.kill()
        elif worker.stdin is not None:
            worker.stdin.close()
        worker.wait()
        return ask(worker, *rest)  # type: ignore[arg-type]

    ask = packing.ask
    if died == "exit":
        monkeypatch.setattr(packing.sys, "executable", "/bin/false")
    else:
        monkeypatch.setattr(packing, "ask", dead)
    with pytest.raises(UserError, match=r"was ended \((SIGKILL|status 1)\), among .*/000.jpg"):
        pack(pets)
    assert names(pets.parent / "cache") == set()


def test_room_on_the_disk_is_asked_for_before(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(pets)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(cache, "decode_all", None)
    with pytest.raises(UserError, match=r"need 1 MB, and .*cache has 0 MB left.\nUse a smaller"):
        pack(pets)
    assert names(pets.parent / "cache") == set()


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Mount a file system over a folder."""
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a small disk")
def test_disk_that_fills_up_while_packing_is_told(
    pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pets.parent / "cache"
    folder.mkdir()
    monkeypatch.setattr(cache, "_check_room", lambda *_: None)  # another program fills it
    with mounted(folder, "-t", "tmpfs", "-o", "size=40k", "tmpfs"):
        with pytest.raises(UserError, match=r"No space left on device.\nUse a smaller") as error:
            pack(pets, side=64)
        assert names(folder) == set()
    assert str(error.value).count("\n") == 1


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a disk")
def test_folder_that_may_only_be_read_is_told_and_a_cache_in_it_is_used(pets: Path) -> None:
    folder = pets.parent / "cache"
    made = pack(pets)
    path, made.lock = made.path, None
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        assert pack(pets).path == path
        with pytest.raises(UserError, match=r"cache: Read-only file system.\nUse data.cache=false"):
            pack(pets, side=14)
        assert pack(pets, side=14, keeps_pixels=False).unreadable == {}


def test_cache_folder_that_is_a_file_is_told(pets: Path) -> None:
    (pets.parent / "cache").write_text("")
    with pytest.raises(UserError, match=r"data.cache_dir=.*cache: File exists"):
        pack(pets)


def test_lock_survives_the_way_to_a_spawned_process(pets: Path) -> None:
    module = data(pets, val_fraction=0.3, test_fraction=0.3)
    _ = module.dataset("train")
    path = module.source.packed.path
    assert path is not None
    again = pickle.loads(pickle.dumps(module))
    del module
    assert not Lock(lock_of(path.parent)).has()
    assert len(again.dataset("train")) > 0
    del again
    assert Lock(lock_of(path.parent)).has()
