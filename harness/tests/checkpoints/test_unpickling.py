"""Reading a checkpoint executes nothing, whatever is in it, and says so where that matters."""

import copy
import io
import pickle
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness import UserError
from harness.checkpoints import unpickling
from harness.checkpoints.reading import read, unreadable
from harness.checkpoints.stand_in import StandIn
from tests.checkpoints import author
from tests.convert.test_security import HOWS, Evil, endless_modules, in_zip, mutate, opcodes

# Reads the files that are named on standard input, and tells where one of them does anything; in
# the end one that may.
AUDITED = """
import sys
import torch, numpy, encodings.latin_1
import tests.checkpoints.author
from harness.checkpoints.reading import read
read(sys.argv[1])
forbidden, path = [], None
def hook(event, args):
    if event == "open" and str(args[0]) == path: return
    if event in ("object.__getattr__", "builtins.id", "sys._getframe", "array.__new__"): return
    forbidden.append((event, repr(args)[:200]))
sys.addaudithook(hook)
for line in sys.stdin:
    path = line.rstrip()
    forbidden.clear()
    try:
        read(path)
    except Exception:
        pass
    found = list(forbidden)
    if found:
        print(path, found)
forbidden.clear()
torch.load(sys.argv[2], weights_only=False)
print(*{event for event, _ in forbidden} & {"os.system"})
"""


def read_audited(folder: Path, paths: list[Path]) -> str:
    """What files do when they are read, and what one does that is let."""
    torch.save(
        {"a": nn.Linear(1, 1), "b": np.ones(1), **author.KNOWN["dtype of torch"]()}, folder / "a"
    )
    torch.save({"a": Evil(folder / "audited")}, folder / "evil")
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AUDITED, str(folder / "a"), str(folder / "evil")],
        input="\n".join(map(str, paths)),
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout.strip()


class Called:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Stateful(Called):
    """Pickled as a call, and a state."""

    def __init__(self, state: Any, function: Any, *arguments: Any) -> None:
        super().__init__(function, *arguments)
        self.state = state

    def __reduce__(self) -> Any:
        return (*self.call, self.state)


def calls(mark: Path) -> dict[str, Any]:
    """Values that would write a file if one of the known kinds called or looked up anything."""
    evil = Evil(mark)
    buffer = io.BytesIO()
    torch.save(evil, buffer)
    address = b"A" * 8  # NumPy takes bytes for pointers where a dtype says that they are objects
    unit = (None, (b"s],O,M8[1s", 1, 1, 1))
    dtype = Stateful((4, "<", None, None, None, -1, -1, 0, unit), np.dtype, "M8", False, True)
    # What runs code if a kind that is known would take it: as key, element, argument and state.
    return {
        "torch.load": Called(torch.load, io.BytesIO),
        "load from bytes": Called(torch.storage._load_from_bytes, buffer.getvalue()),
        "objects": np.array([evil, None], dtype=object),
        "factory": Called(defaultdict, Called(partial, print)),
        "factory of the system": Called(defaultdict, __import__("os").getcwd),
        "partial": partial(__import__("os").system, f"touch {mark}"),
        "parameter": Called(torch._utils._rebuild_parameter, evil, True, OrderedDict()),
        "hooks": Called(torch._utils._rebuild_parameter, torch.ones(1), True, OrderedDict(a=evil)),
        "type": Called(torch._tensor._rebuild_from_type_v2, evil, author.Frame, (), {}),
        "function": Called(
            torch._tensor._rebuild_from_type_v2, exec, torch.Tensor, ("1",), {"a": 1}
        ),
        "dtype": Called(np.dtype, [("a", "O")]),
        "getattr": Called(getattr, nn.Linear, "mro"),
        "state of a set": Stateful({"a": 1}, set, [1]),
        "address": Called(np.float64(0).__reduce__()[0], "O", address),
        "addresses": Stateful(
            (1, (1,), "O", False, address), np.ones(1).__reduce__()[0], np.ndarray, (0,), b"b"
        ),
        "unit": Called(np.float64(0).__reduce__()[0], dtype, address * 3),
        "settings": author.Settings(a=evil),
        "network": nn.Sequential(nn.Linear(1, 1), nn.ReLU()),
    }


def mutated(folder: Path, num: int) -> list[Path]:
    """Checkpoints of every known kind of value whose pickles are damaged at random."""
    rng, paths = random.Random(0), []
    kept = {name: make() for name, make in (author.KNOWN | author.HYPER_PARAMETERS).items()}
    torch.save(kept, folder / "whole")
    with zipfile.ZipFile(folder / "whole") as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    for number in range(num):
        paths.append(folder / f"mutated_{number}")
        with zipfile.ZipFile(paths[-1], "w") as new:
            for name, data in members.items():
                new.writestr(name, mutate(data, rng) if name.endswith("data.pkl") else data)
    return paths


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    # torch's own plain reader, which comes first, has no limits of time and memory.
    pickles = {name: data for name, data in opcodes(mark).items() if "bomb" not in name}
    pickles |= endless_modules()
    pickles |= {
        f"{how}_{p}": pickle.dumps({"a": Evil(mark, how)}, p) for how in HOWS for p in (2, 4)
    }
    for name, data in pickles.items():
        (tmp_path / name).write_bytes(in_zip(data))
    values = calls(mark)
    for name, value in values.items():
        torch.save({"state_dict": {}, "a": value, "b": [value]}, tmp_path / name)
    paths = [tmp_path / name for name in (*pickles, *values)]
    assert read_audited(tmp_path, paths + mutated(tmp_path, num=100)) == "os.system"
    assert not mark.exists()
    for name in values.keys() - {"state of a set"}:
        assert isinstance(read(tmp_path / name)["a"], StandIn) or name == "hooks", name


def test_file_without_a_training_state_is_said_to_be_none(tmp_path: Path) -> None:
    for data in (b"N.", b"]."):
        (tmp_path / "a").write_bytes(in_zip(b"\x80\x02" + data))
        assert "instead of a training's state" in str(unreadable(tmp_path / "a"))


USES: tuple[Callable[[Any], object], ...] = (
    *(bool, list, str, float, len, copy.deepcopy, pickle.dumps, lambda value: value()),
    *(lambda value: value.weight, lambda value: hasattr(value, "weight")),
    *(lambda value: value == 1, lambda value: value[0], lambda value: dict(**value)),
    *(lambda value: f"{value}", lambda value: 1 + value, lambda value: Path("a") / value),
    *(lambda value: torch.ones(1) * value, lambda value: setattr(value, "a", 1)),
    *(lambda value: np.asarray(value, dtype=float), lambda value: value.__enter__()),
)


def test_use_of_what_was_not_built_is_refused(tmp_path: Path) -> None:
    """An author's code gets a sentence, never a wrong value."""
    torch.save({"net": nn.Linear(1, 1)}, tmp_path / "a")
    value = read(tmp_path / "a")["net"]
    for use in USES:
        with pytest.raises(UserError, match=r"A torch\.nn\.modules\.linear\.Linear of the chec"):
            use(value)


def test_shared_values_stay_shared(tmp_path: Path) -> None:
    array, weights = np.ones(2), torch.ones(2)
    torch.save(
        {"a": [array, array], "w": [weights, weights[:1]], "p": partial(print)}, tmp_path / "a"
    )
    found = read(tmp_path / "a")
    assert found["a"][0] is found["a"][1]
    found["w"][0][0] = 5
    assert found["w"][1][0] == 5


def test_known_calls_are_no_more_than_these() -> None:
    """Whoever adds one must ask what it can be made to do."""
    modules = {name.rpartition(".")[0] for name in unpickling.CALLS}
    assert modules <= {
        *("_codecs", "builtins", "collections", "datetime", "decimal", "numpy", "pathlib"),
        *("pathlib._local", "numpy.core.multiarray", "numpy._core.multiarray"),
    }
    assert not {"builtins.getattr", "builtins.eval", "builtins.exec"} & unpickling.CALLS.keys()
