"""Real Slurm on two nodes starts one run, in one folder, which resumes after a restart."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.cluster.runs import NUM_STEPS, WORDS, finished, num_steps, run_folders, where
from tests.cluster.slurm import Slurm
from tests.conftest import ROOT
from tests.workers.disturb import disturb

pytestmark = pytest.mark.slow

TWO = ("--nodes=2", "--ntasks-per-node=1")
ON_BOTH = ("trainer.devices=1", "trainer.num_nodes=2", "resume=auto")
NOT_LOST = 2  # steps that two attempts may both have done: none was saved, or one was traced twice


def words(folder: Path, *more: str, seconds_per_batch: float = 0.5) -> list[str]:
    return [*WORDS, *where(folder, seconds_per_batch), *more]


@pytest.mark.parametrize("name", ["train", "bash"])
def test_tasks_of_srun_are_one_run(name: str, slurm: Slurm, tmp_path: Path) -> None:
    run = words(tmp_path, "strategy=ddp", seconds_per_batch=0.0)
    started = slurm.srun(run, *TWO, f"--job-name={name}")
    assert started.wait() == 0, started.screen()
    assert started.screen().count("DDPStrategy, 2 processes") == 1, started.screen()  # not two runs
    assert len(run_folders(tmp_path)) == 1
    assert finished(tmp_path) == run_folders(tmp_path)


def shown_script(folder: Path) -> Path:
    """scripts/slurm/train.sbatch, edited in its three places for this cluster."""
    text = (ROOT / "scripts" / "slurm" / "train.sbatch").read_text()
    edits = {
        "--account=yours --partition=main --time=24:00:00 --signal=USR1@300": "--partition=main",
        "--nodes=1 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8": " ".join(TWO),
        "train=(python ": f"train=({sys.executable} ",
        "--output=slurm-%j.txt": "",
    }
    for before, after in edits.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path = folder / "train.sbatch"
    path.write_text(text)
    return path


def array_script(folder: Path) -> Path:
    """The same for an array of small jobs; each task has a trace in a folder of its own."""
    path = shown_script(folder)
    text = path.read_text().replace("--nodes=2 --ntasks-per-node=1", "--nodes=1 --ntasks=1")
    place = f"+callbacks.trace.folder={folder}/task_$SLURM_ARRAY_TASK_ID/trace"
    text = text.replace('"$@")', f'"{place}" "$@")').replace("strategy=ddp", "strategy=cpu")
    path.write_text(text)
    return path


def test_script_puts_each_task_of_an_array_back_alone(slurm: Slurm, tmp_path: Path) -> None:
    """Also the last one, whose number is that of the array."""
    run = [word for word in words(tmp_path) if "trace.folder" not in word]
    job = slurm.submit(array_script(tmp_path), run, array="1-2")
    tasks = {number: tmp_path / f"task_{number}" for number in (1, 2)}
    slurm.wait_until(f"{job}_2", lambda: min(map(num_steps, tasks.values())) >= 2)
    slurm.ask("scancel", "--signal=USR1", f"{job}_2")
    states = [slurm.wait(f"{job}_{number}") for number in tasks]
    assert states == ["COMPLETED", "COMPLETED"], slurm.screen(f"{job}_2")
    assert [slurm.about(f"{job}_{number}")["Restarts"] for number in tasks] == ["0", "1"]
    configs = [OmegaConf.load(run_dir / "config.yaml") for run_dir in finished(tmp_path)]
    assert sorted(config.seed for config in configs) == [1, 2]
    assert max(map(num_steps, tasks.values())) <= NUM_STEPS + NOT_LOST


@pytest.mark.parametrize("signum", ["USR1", "TERM"])
def test_script_puts_a_job_back_that_was_asked_to_leave(
    signum: str, slurm: Slurm, tmp_path: Path
) -> None:
    """As Slurm asks before the end of the time, and where a job is preempted."""
    job = slurm.submit(shown_script(tmp_path), words(tmp_path, *ON_BOTH))
    slurm.wait_until(job, lambda: num_steps(tmp_path) >= 4)
    slurm.ask("scancel", f"--signal={signum}", job)
    assert slurm.wait(job) == "COMPLETED", slurm.screen(job)
    assert slurm.about(job)["Restarts"] == "1"
    assert finished(tmp_path) == run_folders(tmp_path)
    assert num_steps(tmp_path) <= NUM_STEPS + NOT_LOST


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_script_puts_no_mistake_back(rank: int | None, slurm: Slurm, tmp_path: Path) -> None:
    """The task that lives longer must not end by the signal that a preempted job gets."""
    mistake = ["model=nope"]
    if rank is not None:
        mistake = disturb(what="error", rank=rank)
    late = "[[ $SLURM_PROCID == 1 ]] && sleep 3; exec"
    script = shown_script(tmp_path)
    script.write_text(
        script.read_text().replace("train=(", f"train=(bash -c '{late} \"$@\"' - ", 1)
    )
    job = slurm.submit(script, words(tmp_path, *ON_BOTH, *mistake, seconds_per_batch=0.0))
    assert slurm.wait(job) == "FAILED", slurm.screen(job)
    slurm.wait_until_idle()
    assert slurm.about(job)["Restarts"] == "0"
    assert ("of a mistake" in slurm.screen(job)) == (rank is not None)


def test_script_leaves_a_cancelled_job_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(shown_script(tmp_path), words(tmp_path, *ON_BOTH))
    slurm.wait_until(job, lambda: num_steps(tmp_path) >= 2)
    slurm.ask("scancel", job)
    assert slurm.wait(job) == "CANCELLED"
    slurm.wait_until_idle()
    assert slurm.state(job) == "CANCELLED"
    assert slurm.about(job)["Restarts"] == "0"


def test_a_node_dies_and_slurm_starts_the_job_anew(slurm: Slurm, tmp_path: Path) -> None:
    run = words(tmp_path, *ON_BOTH, "checkpoint.every_n_steps=5")
    job = slurm.submit(shown_script(tmp_path), run)
    slurm.wait_until(job, lambda: num_steps(tmp_path) >= 7)
    slurm.network.hosts[1].kill()
    # Slurm misses it after SlurmdTimeout, and takes it back as a person brings it back.
    slurm.wait_until(job, lambda: slurm.about(job).get("Restarts") == "1")
    slurm.start_node(2)
    slurm.ask("scontrol", "update", "NodeName=host2", "State=RESUME")
    assert slurm.wait(job) == "COMPLETED", slurm.screen(job)
    assert finished(tmp_path) == run_folders(tmp_path)
    assert num_steps(tmp_path) <= NUM_STEPS + 6
