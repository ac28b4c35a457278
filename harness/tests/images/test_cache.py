"""Packed once, whole or not at all, whoever is killed and whatever the disk says."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from harness import UserError
from harness.images import cache, packing
from harness.images.cache import Packed, packed
from harness.images.decoding import decode
from harness.images.finding import find_files
from harness.testing import clean_environment
from tests.images.made import write_images

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


def test_second_use_decodes_nothing(pets: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    first = pack(pets)
    said = capsys.readouterr().out
    assert "Packing 12 images" in said
    assert "per second" in said
    monkeypatch.setattr(cache, "decode_all", None)
    again = pack(pets)
    assert (again.path, again.unreadable) == (first.path, first.unreadable)
    assert capsys.readouterr().out == ""


def test_other_files_and_settings_are_packed_anew_and_the_earlier_named(
    pets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, paths = pets / "cat" / "001.jpg", [pack(pets).path]

    def touch() -> None:  # of the same size: only its time tells
        os.utime(file, ns=(1, 1))

    for change in (
        lambda: shutil.copy(pets / "dog" / "002.jpg", file),
        touch,
        lambda: shutil.copy(file, pets / "cat" / "new.jpg"),
        lambda: (pets / "cat" / "new.jpg").unlink(),
        lambda: file.rename(pets / "cat" / "other.jpg"),
    ):
        change()
        paths.append(pack(pets).path)
    paths.append(pack(pets, side=14).path)
    assert len(set(paths)) >= 6  # an unlinked file brings back what was before
    assert f"to remove by hand: {pets.parent / 'cache'}/pets-" in capsys.readouterr().out


def test_files_that_cannot_be_read_are_remembered(pets: Path) -> None:
    (pets / "cat" / "002.jpg").write_bytes(b"no image")
    for keeps_pixels in (True, False):
        for _ in range(2):
            found = pack(pets, keeps_pixels=keeps_pixels)
            assert found.unreadable == {6: "no image that Pillow can read"}
            assert (found.path is not None) == keeps_pixels


def test_killed_packing_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    """Its processes end with it, and the next start takes nothing of what it has left."""
    pets = write_images(tmp_path / "pets", num=150)
    folder = tmp_path / "cache"
    process = started(pets)
    size = 450 * SIDE * SIDE * 3
    while process.poll() is None:  # until so much of it is written
        with suppress(OSError, StopIteration):
            part = next(folder.glob("*.part/pixels.uint8"))
            if np.count_nonzero(np.fromfile(part, np.uint8)) >= 0.4 * size:
                break
        time.sleep(0.001)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert {name[-5:] for name in names(folder)} == {".part"}
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < end:
        time.sleep(0.01)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    found = pack(pets)
    assert found.path is not None
    assert names(folder) == {found.path.parent.name}
    assert found.path.stat().st_size == size


def test_worker_that_dies_is_told(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(worker: "subprocess.Popen[str]", *rest: object) -> object:
        worker.kill()
        worker.wait()
        return ask(worker, *rest)  # type: ignore[arg-type]

    ask = packing.ask
    monkeypatch.setattr(packing, "ask", dead)
    with pytest.raises(UserError, match=r"was ended \(SIGKILL\), among .*/000.jpg"):
        pack(pets)
    assert names(pets.parent / "cache") == set()


def test_room_on_the_disk_is_asked_for_before(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(pets)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(cache, "decode_all", None)
    with pytest.raises(UserError, match=r"need 1 MB, and .*cache has 0 MB left.\nUse a smaller"):
        pack(pets)
    assert names(pets.parent / "cache") == set()
