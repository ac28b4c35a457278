import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import testing
from harness.distributed import shutdown
from harness.testing import clean_environment, command, make_cfg

__all__ = [
    "LIBRARY",
    "ROOT",
    "ci",
    "clean_environment",
    "command",
    "finished_run",
    "make_cfg",
    "slow",
]

pytest_configure = testing.pytest_configure  # hides GPUs

LIBRARY = Path(__file__).resolve().parents[1]
SMALL = LIBRARY / "tests" / "project"
# The project whose commands the tests run, and whose folder they run in. Those of examples/ need
# the examples of the template, and run where this variable names its folder.
ROOT = Path(os.environ.get("TEST_PROJECT", SMALL)).resolve()
# The tests, and the commands that they start, import a project, the library, and these tests.
SOURCES = [str(folder) for folder in (ROOT / "src", SMALL / "src", LIBRARY / "src", LIBRARY)]
sys.path[:0] = SOURCES
known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
PYTHONPATH = os.pathsep.join(dict.fromkeys([*SOURCES, *filter(None, known)]))
os.environ["PYTHONPATH"] = PYTHONPATH
# Some tests fork this process, and a fork lacks the threads that torch has computed with.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With cpu, cases for a GPU run on the CPU, for one who changes them without having a GPU.
TEST_DEVICE = os.environ.get("TEST_DEVICE", "cuda")
# What YAML files of tests name: modules of this package, and those that a test writes.
MODULES = "hungry,linear,mine,noting,public,spy,study_of_history,tests"
MODULES += ",gpu,images,startup"  # of benchmarks/
os.environ.setdefault("YAML_ALLOWED", MODULES)
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# The first filter has the least to say: a test's own marks come after these.
WARNINGS = [
    "error",
    "ignore:This DataLoader will create",  # torch, on a machine with fewer cores than workers
    "ignore:Guards may run slower on Python 3.13.0",  # torch, of that interpreter alone
    "ignore:Synchronization debug mode",  # torch, of torch.cuda.set_sync_debug_mode
    "ignore:The `srun` command is available",  # Lightning, wherever Slurm is installed
]


def pytest_collection() -> None:
    """Run all tests in the project's folder, as a user types commands there."""
    os.chdir(ROOT)


def slow(*values: Any, mark: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """Values of parameters that say little more than the others: run with ``-m slow``."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=mark) for row in rows]


def ci(*values: Any) -> list[Any]:
    """Values of parameters that ``make test`` leaves out, and continuous integration runs."""
    return slow(*values, mark=pytest.mark.ci)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A warning is an error in the library's tests, and the user decides in a project's."""
    num_gpus = torch.cuda.device_count() if TEST_DEVICE == "cuda" else 2
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS), append=False)
        for name, needed in (("gpu", 1), ("multi_gpu", 2)):
            is_elsewhere = TEST_DEVICE != "cuda" and "tests/gpu/" not in str(item.path)
            if item.get_closest_marker(name) and (num_gpus < needed or is_elsewhere):
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s)"))


@pytest.fixture(autouse=True)
def nobody_is_followed() -> Iterator[None]:
    """A test that follows a launcher in this process would end the runs that later tests fork."""
    yield
    followed, shutdown.parent_pid = shutdown.parent_pid, 0
    assert not followed


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short training run, made by the command itself."""
    words = ["trainer.max_epochs=2", "data=synthetic", "model=mlp"]
    words += ["+callbacks.labels._target_=tests.monitoring.labels.Labels"]
    return train_command(tmp_path_factory.mktemp("outputs"), *words)


def train_command(folder: Path, *words: str) -> Path:
    """Run ``train.py``; the folder of its run below a folder, where ``screen.txt`` is, too."""
    # Imported here: that module starts commands with a folder of this one.
    from tests.faults.fork_server import command

    result = command("train.py", *words, f"output_dir={folder}")
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "screen.txt").write_text(result.stdout + result.stderr)
    (run_dir,) = (folder / "default").iterdir()
    return run_dir
