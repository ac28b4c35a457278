"""A sweep on a real Slurm of two nodes: train.py -m sweep=slurm."""

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import provenance
from harness.runs import reading
from tests.cluster.hosts import Started, wait_for
from tests.cluster.runs import NUM_STEPS, WORDS, num_steps
from tests.cluster.slurm import Slurm
from tests.conftest import command, slow
from tests.faults import fork_server
from tests.faults.run_folder import only

pytestmark = pytest.mark.slow

CLUSTER = ("sweep=slurm", "sweep.sbatch.gpus_per_node=null", "sweep.sbatch.cpus_per_task=1")
SMALL = (*WORDS, "strategy=cpu", "watch=none", "test=false")


def start(slurm: Slurm, folder: Path, *overrides: str) -> Started:
    """Start a driver on the first node: a new interpreter, as a fork may not use Polars again."""
    words = ["-m", *CLUSTER, f"output_dir={folder}", *overrides]
    return slurm.network.hosts[0].start([sys.executable, "train.py", *words], slurm.environment)


def sweep_in(folder: Path) -> Path:
    return only(only(folder / "sweeps"))


def num_submitted(sweep: Path) -> int:
    """The Slurm jobs that a sweep has ever submitted; submitit keeps the script of each."""
    return len([*(sweep / "slurm").glob("*_submission.sh")])


def slowly(folder: Path, seconds: float = 0.3) -> list[str]:
    """Overrides of a run that takes its time, and notes its steps."""
    words = ["+callbacks.trace._target_=tests.faults.trace.Trace"]
    words += [f"+callbacks.trace.folder={folder}/trace"]
    return [*words, f"+callbacks.trace.seconds_per_batch={seconds}"]


def wait_until(driver: Started, is_so: Callable[[], object]) -> None:
    wait_for(is_so, driver.screen, pause_seconds=0.1)


def test_a_grid_keeps_a_failed_job_and_is_listed_while_it_runs(
    slurm: Slurm, tmp_path: Path
) -> None:
    grid = [*SMALL, *slowly(tmp_path, 0.6), "model.optimizer.lr=0.1,0.01,-1", "seed=1,2"]
    driver = start(slurm, tmp_path, *grid)
    wait_until(driver, lambda: [*tmp_path.glob("sweeps/*/*/*/metrics.csv")])
    listed = command("-m", "harness.compare", "ls", tmp_path, "--json")
    assert {row["status"] for row in json.loads(listed.stdout)} & {"running"}
    assert driver.wait() == 1, driver.screen()
    sweep, screen = sweep_in(tmp_path), driver.screen()
    assert "6 jobs in" in screen
    assert "at most 6 at a time as Slurm jobs" in screen
    assert "2 failed, 4 finished" in screen
    assert "model.optimizer: Invalid learning rate: -1" in screen
    assert num_submitted(sweep) == 6
    again = start(slurm, tmp_path, *grid, "resume=auto")
    assert again.wait() == 1
    assert "6 jobs in" in again.screen()
    assert "2 to run" in again.screen()
    assert num_submitted(sweep) == 8


def test_optuna_asks_for_a_trial_as_soon_as_one_has_ended(slurm: Slurm, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    words = ["sweep=[optuna,slurm]", "sweep.num_trials=8", "sweep.num_parallel=4"]
    rate = "model.optimizer.lr=tag(log,interval(1e-4,1e-1))"
    driver = start(slurm, tmp_path, *words, *SMALL, rate)
    assert driver.wait() == 0, driver.screen()
    sweep = sweep_in(tmp_path)
    (study,) = optuna.get_all_study_names(url := f"sqlite:///{sweep}/study.db")
    trials = optuna.load_study(study_name=study, storage=url).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 8
    for trial in trials:
        assert trial.value == reading.read(sweep / str(trial.number))["best"]
    events = [line.split() for line in driver.screen().splitlines() if line.startswith("job ")]
    kinds = "".join("+" if event[3] == "submitted" else "-" for event in events)
    assert kinds.startswith("++++-")
    assert kinds.rindex("+") < kinds.rindex("----")  # one poll may see several ends, but not four


@pytest.mark.parametrize("num_kills", [3, *slow(10)])
def test_kills_of_the_driver_change_no_result_and_train_no_job_twice(
    num_kills: int, slurm: Slurm, tmp_path: Path
) -> None:
    """Each of eight jobs has one Slurm job, one start, and the results of a local sweep."""
    overrides = [*SMALL, "model.optimizer.lr=0.1,0.03,0.01,0.003", "seed=1,2"]
    draw = random.Random(num_kills)
    for _ in range(num_kills):
        driver = start(slurm, tmp_path, *overrides, "resume=auto", "sweep.num_parallel=4")
        time.sleep(0.3 + draw.random() * 5)
        os.kill(driver.process.pid, signal.SIGKILL)
        driver.process.wait()
    driver = start(slurm, tmp_path, *overrides, "resume=auto")
    assert driver.wait() == 0, driver.screen()
    (sweep,) = [path.parent for path in tmp_path.glob("sweeps/*/*/overrides.yaml")]
    assert num_submitted(sweep) == 8
    local = fork_server.command(
        *("train.py", "-m", *overrides, "sweep.num_parallel=2", f"output_dir={tmp_path}/local")
    )
    assert local.returncode == 0, local.stdout + local.stderr
    for number in range(8):
        here, there = sweep / str(number), sweep_in(tmp_path / "local") / str(number)
        assert len(provenance.read(here)["starts"]) == 1
        for name in ("results.json", "metrics.csv"):
            assert (here / name).read_bytes() == (there / name).read_bytes()


def slurm_job(sweep: Path, number: int = 0) -> str:
    return (sweep / str(number) / "slurm_job.txt").read_text()


def test_a_requeued_job_resumes(slurm: Slurm, tmp_path: Path) -> None:
    driver = start(
        slurm, tmp_path, *SMALL, *slowly(tmp_path), "seed=1", "checkpoint.every_n_steps=2"
    )
    wait_until(driver, lambda: num_steps(tmp_path) >= 5)
    sweep = sweep_in(tmp_path)
    slurm.ask("scontrol", "requeue", slurm_job(sweep))
    assert driver.wait() == 0, driver.screen()
    assert slurm.about(slurm_job(sweep))["Restarts"] == "1"
    assert num_steps(tmp_path) <= NUM_STEPS + 4
    assert "1 finished" in driver.screen()
    assert num_submitted(sweep) == 1


def test_a_job_that_reaches_its_time_limit_resumes(slurm: Slurm, tmp_path: Path) -> None:
    time_limit = ("sweep.sbatch.time=00:02:00", "sweep.sbatch.signal=USR1@60")
    driver = start(slurm, tmp_path, *SMALL, *slowly(tmp_path, 5.0), *time_limit, "seed=1")
    assert driver.wait() == 0, driver.screen()
    restarts = int(slurm.about(slurm_job(sweep_in(tmp_path)))["Restarts"])
    assert restarts >= 1
    assert num_steps(tmp_path) <= NUM_STEPS + 2 * restarts


def test_a_job_of_two_ranks_runs_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    words = [*WORDS, "strategy=ddp", "trainer.devices=1", "watch=none", "seed=1,2"]
    driver = start(slurm, tmp_path, *words, "sweep.sbatch.nodes=2")
    assert driver.wait() == 0, driver.screen()
    for number in (0, 1):
        screen = (sweep_in(tmp_path) / str(number) / "screen.log").read_text()
        assert screen.count("DDPStrategy, 2 processes") == 1, screen


def test_ranks_that_do_not_fit_the_tasks_of_srun_are_the_reason_in_the_table(
    slurm: Slurm, tmp_path: Path
) -> None:
    words = [*WORDS, "strategy=ddp", "trainer.devices=4", "sweep.sbatch.ntasks_per_node=2"]
    driver = start(slurm, tmp_path, *words, "seed=1")
    assert driver.wait() == 1, driver.screen()
    assert "failed: srun has started 2 processes, but these settings need 4" in driver.screen()


def test_a_trial_that_failed_before_its_start_while_no_driver_waited_is_given_up(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Optuna suggests another one."""
    pytest.importorskip("optuna")
    words = ["sweep=[optuna,slurm]", "sweep.num_trials=2", "sweep.num_parallel=1", *SMALL]
    words += ["model.optimizer.lr=tag(log,interval(1e-4,1e-1))", "resume=auto"]
    driver = start(slurm, tmp_path, *words, "sweep.wait=false", "sweep.setup=['exit 3']")
    assert driver.wait() == 0, driver.screen()
    sweep = sweep_in(tmp_path)
    wait_until(driver, lambda: slurm.state(slurm_job(sweep)) == "FAILED")
    driver = start(slurm, tmp_path, *words)
    assert driver.wait() == 1, driver.screen()
    assert "job 0 failed: Slurm job" in driver.screen()
    assert "1 failed, 1 finished" in driver.screen()
    assert num_submitted(sweep) == 2


def test_a_cancelled_job_is_shown_and_runs_when_the_sweep_resumes(
    slurm: Slurm, tmp_path: Path
) -> None:
    overrides = [*SMALL, *slowly(tmp_path), "seed=1,2"]
    driver = start(slurm, tmp_path, *overrides)
    wait_until(driver, lambda: num_steps(tmp_path) >= 2)
    sweep = sweep_in(tmp_path)
    slurm.ask("scancel", cancelled := slurm_job(sweep, 0))
    assert driver.wait() == 1, driver.screen()
    assert f"job 0 stopped: Slurm job {cancelled} ended as CANCELLED" in driver.screen()
    assert "1 finished, 1 stopped" in driver.screen()
    again = start(slurm, tmp_path, *overrides, "resume=auto")
    assert again.wait() == 0, again.screen()
    assert num_submitted(sweep) == 3


def test_a_sweep_that_does_not_wait_is_collected_later(slurm: Slurm, tmp_path: Path) -> None:
    """Ctrl-C of the driver that collects leaves the jobs, and prints how to cancel them."""
    overrides = [*SMALL, *slowly(tmp_path), "seed=1,2"]
    driver = start(slurm, tmp_path, *overrides, "sweep.wait=false")
    assert driver.wait() == 0, driver.screen()
    sweep = sweep_in(tmp_path)
    assert "2 waiting" in driver.screen()
    second = start(slurm, tmp_path, *overrides, "resume=auto")
    wait_until(second, lambda: second.screen().count("is still Slurm job") == 2)
    second.process.send_signal(signal.SIGINT)
    assert second.wait() == 128 + signal.SIGINT, second.screen()
    assert "SIGINT: 2 Slurm jobs continue. To cancel them, type: scancel" in second.screen()
    third = start(slurm, tmp_path, *overrides, "resume=auto")
    assert third.wait() == 0, third.screen()
    assert "is still Slurm job" in third.screen()
    assert num_submitted(sweep) == 2
    fourth = start(slurm, tmp_path, *overrides, "sweep.wait=false", "notes=another")
    assert fourth.wait() == 0
    (name,) = {*slurm.ask("squeue", "-h", "-o", "%j").split()}
    cancel = re.search(r"type: (scancel --name=)\S+", second.screen())
    assert cancel is not None
    slurm.ask(*f"{cancel[1]}{name}".split())
    wait_until(fourth, lambda: not slurm.ask("squeue", "-h"))
    assert {*map(len, (provenance.read(sweep / n)["starts"] for n in "01"))} == {1}
    assert json.loads((sweep / "0" / "results.json").read_text())
