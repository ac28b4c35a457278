"""A sweep's runs as jobs of submitit: make packages installs it, and so does the long command."""

from pathlib import Path

import pytest

from tests_harness.cluster import slurm as cluster
from tests_harness.cluster.slurm import Slurm
from tests_harness.cluster.submitit_sweep import (
    LAUNCHERS,
    LIMIT_SECONDS,
    STRATEGIES,
    install,
    num_finished,
    start,
)

pytestmark = pytest.mark.packages


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_jobs_of_submitit_run_the_command(launcher: str, strategy: str, tmp_path: Path) -> None:
    if reason := cluster.missing():
        pytest.skip(reason)
    started_cluster = Slurm(tmp_path)
    try:
        path = install(tmp_path / "packages")
        words = (*LAUNCHERS[launcher], *STRATEGIES[strategy])
        started = start(started_cluster, tmp_path, path, *words)
        assert started.wait(LIMIT_SECONDS) == 0, started.screen()
        assert num_finished(tmp_path) == 2, started.screen()
    finally:
        started_cluster.close()
