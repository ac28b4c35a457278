"""Faults that each break a promise, planted in a copy of the library, and tests that find them.

    pytest -s -m slow tests/test_planted_faults.py -k share    those whose name has the word

Each names tests of `make test`, of which one must be red.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.conftest import LIBRARY

SRC = Path("src", "harness")


class Fault(NamedTuple):
    """One change of one file that no user must ever meet."""

    path: str  # of the file, below harness/
    text: str  # stands in it once
    fault: str  # takes its place
    tests: str  # find it


FAULTS = {
    "a sample is trained on twice": Fault(
        "data/shared_batches.py",
        "yield indices[low:high] or indices[:1]",
        "yield indices[max(0, low - 1) : high] or indices[:1]",
        "test_same_experiment.py",
    ),
    "a smaller share counts as a whole one": Fault(
        "data/batches.py",
        "return local_size * self.num_local_batches / global_size",
        "return 1.0",
        "test_same_experiment.py",
    ),
    "the sample that pads an empty share is counted": Fault(
        "data/batches.py",
        "return local_size == 0 and global_size > 0",
        "return False",
        "parity/test_step_values.py",
    ),
    "a resumed epoch begins one step late": Fault(
        "data/shared_batches.py",
        "self.start = (epoch, step)\n",
        "self.start = (epoch, step + 1)\n",
        "checkpoints/test_resume.py",
    ),
    "a file is named before it is on the disk": Fault(
        "files.py", "            os.fsync(file.fileno())\n", "", "test_files.py"
    ),
    "a converted file lacks a weight": Fault(
        "convert/choose.py",
        "    state = _state(found, budget)\n",
        "    state = dict([*_state(found, budget).items()][:-1])\n",
        "convert/test_matrix.py",
    ),
    "the last rows of metrics.csv are not written": Fault(
        "loggers/metrics_table.py",
        "        self._write(self.rows)\n        self.rows = []",
        "        self.rows = []",
        "loggers",
    ),
    "replicas that differ are not noticed": Fault(
        "monitoring/replicas.py",
        "if (all_sums == all_sums[0]).all():",
        "if (all_sums == all_sums).all():",
        "monitoring/test_replicas.py",
    ),
    "two commands compute one run": Fault(
        "command/run_folder.py",
        "fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "command/test_run_folder.py command/test_resume_command.py",
    ),
    "a YAML file calls any method": Fault(
        "targets.py",
        "if is_listed or _may_be_built(target, str(module)):",
        "if name:",
        "test_targets.py",
    ),
    "dp joins the shares in another order": Fault(
        "strategies/parallel_forward.py",
        "return join(outputs, self.last_sizes, self.scalar_outputs)",
        "return join(outputs[::-1], self.last_sizes[::-1], self.scalar_outputs)",
        "strategies/test_module_zoo.py strategies/test_parity.py",
    ),
    "a signal ends the run as if it had finished": Fault(
        "distributed/shutdown.py",
        "    os._exit(status)\n",
        "    os._exit(0)\n",
        "faults distributed/test_shutdown.py",
    ),
}


def misplaced() -> list[str]:
    """Names of faults whose text does not stand once in its file, or whose tests are gone."""
    return [
        name
        for name, fault in FAULTS.items()
        if (LIBRARY / SRC / fault.path).read_text().count(fault.text) != 1
        or not all((LIBRARY / "tests" / path).exists() for path in fault.tests.split())
    ]


def is_found(fault: Fault, folder: Path) -> bool:
    """Run tests against a copy of the library that has the fault; whether one is red."""
    copy = folder / "copy"
    left_out = shutil.ignore_patterns(".git", ".venv*", "outputs", "build", "*.egg-info", "*cache*")
    shutil.copytree(LIBRARY, copy, ignore=left_out)
    path = copy / SRC / fault.path
    path.write_text(path.read_text().replace(fault.text, fault.fault))
    tests = [f"tests/{name}" for name in fault.tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    known = os.environ.get("PYTHONPATH", "")
    env = os.environ | {"PYTHONPATH": f"{copy / 'src'}{os.pathsep}{known}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 1), f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    red = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print("   ", *(red or ["NOT FOUND"]), flush=True)
    return done.returncode == 1
