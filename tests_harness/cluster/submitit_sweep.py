"""Sweeps by submitit, on this machine and under Slurm: conf/hydra/launcher/slurm.yaml."""

import subprocess
import sys
import time
from pathlib import Path

from tests_harness.cluster.hosts import Started
from tests_harness.cluster.long_hosts import Rows
from tests_harness.cluster.runs import WORDS, screens, where
from tests_harness.cluster.slurm import Slurm
from tests_harness.conftest import ROOT

# As pyproject.toml's extra has them; what they need besides is installed.
PACKAGES = ("hydra-submitit-launcher>=1.2,<1.3", "submitit>=1.5,<1.6")
LIMIT_SECONDS = 600.0
# The cluster of the tests has neither GPUs nor accounting.
NO_GPUS = (
    *("hydra/launcher=slurm", "hydra.launcher.partition=main", "hydra.launcher.cpus_per_task=1"),
    *("hydra.launcher.gpus_per_node=null", "hydra.launcher.timeout_min=30"),
)
LAUNCHERS = {
    "local": ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=30"),
    "slurm": NO_GPUS,
}
STRATEGIES = {"one process": (), "ddp": ("strategy=ddp", "trainer.devices=2")}


def install(folder: Path) -> str:
    """Install submitit into a folder, and return what Python has to search besides."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *PACKAGES],
        check=True,
        timeout=300,
    )
    return str(folder)


def start(cluster: Slurm, folder: Path, path: str, *words: str) -> Started:
    """Start a sweep of two runs on the first node."""
    line = [sys.executable, "train.py", "-m", *WORDS, *where(folder), "seed=1,2", *words]
    search = {"PYTHONPATH": f"{ROOT}/src:{ROOT}:{path}"}
    return cluster.network.hosts[0].start(line, cluster.environment | search)


def num_finished(folder: Path) -> int:
    """Runs of a sweep that have come to their end."""
    return len(list(folder.glob("outputs/sweeps/*/*/results.json")))


def sweep(folder: Path) -> Rows:
    """Both executors, with one process and with ddp."""
    cluster, path, rows = Slurm(folder), install(folder / "packages"), {}
    for launcher, words in LAUNCHERS.items():
        for name, strategy in STRATEGIES.items():
            there, began = folder / launcher / name.replace(" ", "_"), time.monotonic()
            there.mkdir(parents=True)
            started = start(cluster, there, path, *words, *strategy)
            try:
                status = started.wait(LIMIT_SECONDS)
            except AssertionError as error:
                rows[f"submitit, {launcher}, {name}"] = False, " ".join(str(error).split())[-300:]
                cluster.clear()
                continue
            said = "" if status == 0 else " ".join(screens([started]).split())[-300:]
            rows[f"submitit, {launcher}, {name}"] = (
                status == 0 and num_finished(there) == 2,
                f"status {status}, {num_finished(there)} of 2 runs, "
                f"{time.monotonic() - began:.0f} s {said}",
            )
    cluster.close()
    return rows
