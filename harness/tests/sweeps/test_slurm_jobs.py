"""The jobs of a sweep as Slurm jobs, by a fake Slurm; tests/cluster has a real one."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness import provenance
from harness.errors import UserError
from harness.sweeps import slurm
from harness.sweeps.driver import run_jobs
from harness.sweeps.queue import Job, Queue
from harness.sweeps.slurm import NOTE, SlurmJobs
from tests.conftest import ROOT, command
from tests.refusals import refusal
from tests.sweeps.fake_slurm import FakeSlurm

SETTINGS: dict[str, Any] = {
    "poll_seconds": 0,
    "setup": ["module load cuda"],
    "sbatch": {
        "partition": "gpu",
        "time": "4:00:00",
        "account": None,
        "signal": "USR1@300",
        "requeue": True,
    },
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    pytest.importorskip("submitit")
    return FakeSlurm(tmp_path / "fake", monkeypatch)


def jobs_in(folder: Path, number: int = 3) -> list[Job]:
    folder.mkdir(parents=True, exist_ok=True)
    return [Job(i, [f"seed={i}"], folder / str(i)) for i in range(number)]


def place_of(folder: Path, num_parallel: int = 3, **settings: Any) -> SlurmJobs:
    program = [sys.executable, "train.py"]
    return SlurmJobs(folder, program, SETTINGS | settings, num_parallel)


def started(place: SlurmJobs, job: Job) -> str:
    """Start a job as the driver does, again and again until the place takes it."""
    while (text := place.start(job)) is None:
        pass
    return text


def test_variables_that_replace_options_are_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("SLURM_JOB_ID", "SBATCH_TIMELIMIT", "SQUEUE_PARTITION", "SLURM_CONF", "SLURM_JWT")
    for name in names:
        monkeypatch.setenv(name, "7")
    slurm.remove_variables()
    assert [name for name in names if name in os.environ] == ["SLURM_CONF", "SLURM_JWT"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit's Popen
def test_submitit_starts_a_job_whose_run_is_in_the_jobs_folder(tmp_path: Path) -> None:
    """By submitit's local executor: its own process, which becomes that of train.py."""
    pytest.importorskip("submitit")
    words = ["data=synthetic", "model=mlp", "strategy=cpu", "trainer.max_epochs=1", "watch=none"]
    job = Job(0, [*words, "data.num_train=640"], tmp_path / "sweep" / "0")
    job.folder.parent.mkdir()
    place = SlurmJobs(job.folder.parent, [sys.executable, "train.py"], SETTINGS, 1, "local")
    assert place.start(job)
    end = time.monotonic() + 200
    while job.run["status"] != "finished" and time.monotonic() < end:
        time.sleep(0.05)
    assert job.run["status"] == "finished", [p.read_text() for p in place.scripts.glob("*.out")]
    (start,) = provenance.read(job.folder)["starts"]
    assert "submitit" not in start["command"]


def test_script_has_the_options_the_setup_and_the_lines_that_requeue(
    fake: FakeSlurm, tmp_path: Path
) -> None:
    jobs = jobs_in(tmp_path / "a b" / "sweep")
    place = place_of(jobs[0].folder.parent)
    assert place.start(jobs[1]) == "is submitted as Slurm job 1"
    script = (fake.folder / "script_1").read_text()
    for line in (
        f"#SBATCH --job-name={place.name}",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=4:00:00",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output='{jobs[1].folder}/screen.log'",
        "module load cuda",
        *slurm.REQUEUE.splitlines(),
    ):
        assert line in script.splitlines()
    assert "account" not in script
    assert (jobs[1].folder / NOTE).read_text() == "1"


def test_lines_that_requeue_are_those_of_the_templates_script() -> None:
    script = ROOT / "scripts" / "slurm" / "train.sbatch"
    text = script.read_text().replace("$job", "$SLURM_JOB_ID")
    for line in slurm.REQUEUE.splitlines():
        assert line.partition(" && sleep")[0] in text, line


def test_next_driver_finds_the_jobs_that_slurm_has_and_submits_none_twice(
    fake: FakeSlurm, tmp_path: Path
) -> None:
    """Also after a kill between sbatch and its answer; an ended job is submitted again."""
    jobs = jobs_in(tmp_path / "sweep")
    first = place_of(tmp_path / "sweep")
    for job in jobs:
        first.start(job)
    (jobs[0].folder / NOTE).write_text("")
    fake.set_state(2, "CANCELLED")
    second = place_of(tmp_path / "sweep")
    assert [second.start(job) for job in jobs] == [
        "is still Slurm job 1",
        "is submitted as Slurm job 4",
        "is still Slurm job 3",
    ]
    assert second.poll() == []


def test_job_that_sbatch_submitted_in_spite_of_its_error_is_not_submitted_twice(
    fake: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as a time-out of its answer. The job waits for a file, which the next start writes."""
    from submitit.helpers import DelayedSubmission

    (job,) = jobs_in(tmp_path / "sweep", 1)
    (fake.folder / "refusal").write_text("error: Socket timed out on send/recv operation")
    assert place_of(tmp_path / "sweep").start(job) is None
    assert "Socket timed out" in capfd.readouterr().out
    (fake.folder / "jobs").write_text("0 1 PENDING\n")
    (fake.folder / "refusal").unlink()
    assert place_of(tmp_path / "sweep").start(job) == "is still Slurm job 1"
    assert (job.folder / NOTE).read_text() == "1"
    submitted = DelayedSubmission.load(tmp_path / "sweep" / "slurm" / "1_submitted.pkl")
    assert submitted.args[1][-1] == "seed=0"
    (fake.folder / "jobs").write_text("")
    (fake.folder / "refusal").write_text("error: invalid partition specified: x")
    (job,) = jobs_in(tmp_path / "other", 1)
    with pytest.raises(UserError, match="invalid partition"):
        place_of(tmp_path / "other").start(job)
    assert not (job.folder / NOTE).exists()


def test_next_driver_waits_for_an_sbatch_that_a_killed_driver_has_started(
    fake: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints once why it waits, and Ctrl-C stops it."""
    (job,) = jobs_in(tmp_path / "sweep", 1)
    job.folder.mkdir()
    (job.folder / NOTE).write_text("")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    stopped = run_jobs(Queue([job]), place_of(tmp_path / "sweep"))
    assert stopped == (signal.SIGINT, [])
    late = threading.Timer(2.5, lambda: (fake.folder / "jobs").write_text("0 1 PENDING\n"))
    late.start()
    capfd.readouterr()
    assert started(place_of(tmp_path / "sweep"), job) == "is still Slurm job 1"
    assert capfd.readouterr().out.count("sbatch may still submit it") == 1
    old = time.time() - slurm.SUBMIT_SECONDS
    (fake.folder / "jobs").write_text("")
    (job.folder / NOTE).write_text("")
    os.utime(job.folder / NOTE, (old, old))
    assert place_of(tmp_path / "sweep").start(job) == "is submitted as Slurm job 1"


def test_a_brief_failure_of_sbatch_does_not_end_a_sweep_of_which_nothing_runs(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lasting one does. The list of squeue says each time whether the job is submitted."""
    jobs = jobs_in(tmp_path / "sweep")
    monkeypatch.setattr(slurm, "SUBMIT_SECONDS", 0.6)
    refusal_file = fake.folder / "refusal"
    refusal_file.write_text("sbatch: error: Unable to contact slurm controller")
    threading.Timer(1.5, refusal_file.unlink).start()
    assert run_jobs(Queue(jobs), place_of(tmp_path / "sweep"), wait=False) == (0, jobs)
    assert [number for number, _ in fake.jobs()] == ["0", "1", "2"]
    (fake.folder / "jobs").write_text("")
    refusal_file.write_text("sbatch: error: Unable to contact slurm controller")
    monkeypatch.setattr(slurm, "MAX_FAILURES", 2)
    with pytest.raises(UserError, match="Unable to contact"):
        run_jobs(Queue(jobs_in(tmp_path / "other")), place_of(tmp_path / "other"))


@pytest.mark.parametrize(
    "rows",
    [
        "0 1 RUNNING\n0 2 FAILED\n",
        "0 2 FAILED\n0 1 PENDING\n",
        "0 1 RUNNING\nsite 3 RUNNING\n 4 RUNNING\n0 of 9 5 RUNNING\n(null) 6 FAILED\n",
    ],
)
def test_the_last_job_that_has_not_ended_counts_and_foreign_comments_are_ignored(
    rows: str, fake: FakeSlurm, tmp_path: Path
) -> None:
    (job,) = jobs_in(tmp_path / "sweep", 1)
    (fake.folder / "jobs").write_text(rows)
    place = place_of(tmp_path / "sweep")
    assert place.start(job) == "is still Slurm job 1"
    assert place.poll() == []


def test_a_job_that_failed_before_its_run_began_while_no_driver_waited_is_recorded(
    fake: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if squeue has forgotten it. Else Optuna would never give up its trial."""
    jobs = jobs_in(tmp_path / "sweep")

    def drive() -> str:
        left = Queue([job for job in jobs if job.run["status"] != "failed"])
        assert run_jobs(left, place_of(tmp_path / "sweep"), wait=False)[0] == 0
        return capfd.readouterr().out

    drive()
    fake.set_state(1, "FAILED")
    assert "job 0 failed: Slurm job 1 failed before its run began: see screen.log" in drive()
    assert len(fake.jobs()) == 3
    (jobs[1].folder / "screen.log").write_text("module: command not found")
    (fake.folder / "jobs").write_text("")
    printed = drive()
    assert "job 1 failed: Slurm job 2 failed before its run began: see screen.log" in printed
    assert "job 2 is submitted as Slurm job 1" in printed  # cancelled before its start
    assert [job.run["status"] for job in jobs] == ["failed", "failed", "stopped"]
    assert place_of(tmp_path / "sweep").start(jobs[0]) == "is submitted as Slurm job 2"


def test_a_job_that_was_submitted_again_does_not_show_the_reason_of_the_last_one(
    fake: FakeSlurm, tmp_path: Path
) -> None:
    (job,) = jobs_in(tmp_path / "sweep", 1)
    for state in ("FAILED", "TIMEOUT"):
        place = place_of(tmp_path / "sweep")
        place.start(job)
        fake.set_state(len(fake.jobs()), state)
        assert place.poll() == [job]
    assert job.run["status"] == "stopped"
    assert job.run["reason"] == "Slurm job 2 ended as TIMEOUT: see screen.log"
    place = place_of(tmp_path / "sweep")
    place.start(job)
    (fake.folder / "jobs").write_text("")
    assert place.poll() == [job]
    assert job.run["reason"] == "killed before its first checkpoint"


def test_a_percent_sign_in_the_folder_is_none_of_sbatchs_placeholders(
    fake: FakeSlurm, tmp_path: Path
) -> None:
    jobs = jobs_in(tmp_path / "80%j" / "sweep")
    place_of(jobs[0].folder.parent).start(jobs[0])
    script = (fake.folder / "script_1").read_text()
    assert f"--output={tmp_path}/80%%j/sweep/0/screen.log\n" in script
    assert f"--output {tmp_path}/80%%j/sweep/0/screen.log " in script


def test_a_sweep_without_requeue_overrides_the_clusters_default(
    fake: FakeSlurm, tmp_path: Path
) -> None:
    jobs = jobs_in(tmp_path / "sweep")
    settings = SETTINGS["sbatch"] | {"requeue": False}
    place_of(tmp_path / "sweep", sbatch=settings).start(jobs[0])
    lines = (fake.folder / "script_1").read_text().splitlines()
    assert "#SBATCH --no-requeue" in lines
    assert "#SBATCH --requeue" not in lines


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        ("CANCELLED", "stopped", "Slurm job 1 ended as CANCELLED: see screen.log"),
        ("TIMEOUT", "stopped", "Slurm job 1 ended as TIMEOUT: see screen.log"),
        ("FAILED", "failed", "Slurm job 1 failed before its run began: see screen.log"),
        ("", "stopped", "killed before its first checkpoint"),  # squeue has forgotten it
    ],
)
def test_a_job_that_has_ended_has_the_reason_in_its_folder(
    state: str, status: str, reason: str, fake: FakeSlurm, tmp_path: Path
) -> None:
    (job,) = jobs_in(tmp_path / "sweep", 1)
    place = place_of(tmp_path / "sweep")
    place.start(job)
    for alive in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"):
        fake.set_state(1, alive)
        assert place.poll() == []
    if state:
        fake.set_state(1, state)
    else:
        (fake.folder / "jobs").write_text("")
    assert place.poll() == [job]
    assert (job.run["status"], job.run["reason"]) == (status, reason)


def test_a_job_that_slurm_calls_completed_may_show_its_results_later(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system hides a new file for a while."""
    (job,) = jobs_in(tmp_path / "sweep", 1)
    place = place_of(tmp_path / "sweep")
    place.start(job)
    fake.set_state(1, "COMPLETED")
    assert place.poll() == []
    (job.folder / "results.json").write_text("{}")
    assert place.poll() == [job]


def test_the_driver_waits_while_squeue_does_not_answer(
    fake: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (job,) = jobs_in(tmp_path / "sweep", 1)
    place = place_of(tmp_path / "sweep")
    place.start(job)
    (fake.folder / "silence").touch()
    assert place.poll() == place.poll() == []
    assert capfd.readouterr().out.count("Unable to contact slurm controller") == 1
    with pytest.raises(UserError, match="squeue does not answer"):
        place_of(tmp_path / "sweep").start(job)


def test_a_job_that_waits_for_ever_or_is_put_back_is_told_once(
    fake: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (job,) = jobs_in(tmp_path / "sweep", 1)
    place = place_of(tmp_path / "sweep")
    place.start(job)
    for state in ("PENDING Priority", "PENDING PartitionConfig", "RUNNING None", "PENDING None"):
        fake.set_state(1, state)
        assert place.poll() == place.poll() == []
    assert capfd.readouterr().out.splitlines() == [
        "job 0 waits in Slurm's queue: PartitionConfig",
        "job 0 was put back into Slurm's queue",
    ]


def test_a_refused_job_waits_for_the_end_of_another_and_the_first_is_an_error(
    fake: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where the user's limit of submitted jobs is lower than sweep.num_parallel."""
    jobs = jobs_in(tmp_path / "sweep")
    place = place_of(tmp_path / "sweep")
    (fake.folder / "refusal").write_text("sbatch: error: QOSMaxSubmitJobPerUserLimit")
    with pytest.raises(UserError, match="QOSMaxSubmitJobPerUserLimit"):
        run_jobs(Queue(jobs), place)
    (fake.folder / "refusal").unlink()

    def poll(poll: Any = place.poll) -> list[Job]:
        if len(fake.jobs()) == 1:
            if not (fake.folder / "refusal").exists():
                (fake.folder / "refusal").write_text("sbatch: error: QOSMaxSubmitJobPerUserLimit")
            elif "tries again" in capfd.readouterr().out:
                (fake.folder / "refusal").unlink()
                fake.set_state(1, "CANCELLED")
        for number in (2, 3):
            if len(fake.jobs()) >= number:
                fake.set_state(number, "CANCELLED")
        return poll()

    place.poll = poll  # type: ignore[method-assign]
    assert run_jobs(Queue(jobs), place) == (0, [])
    assert [number for number, _ in fake.jobs()] == ["0", "1", "2"]


def test_jobs_that_run_are_taken_up_before_others_are_submitted(
    fake: FakeSlurm, tmp_path: Path
) -> None:
    """Else a full queue would refuse the first job, and the sweep would end."""
    jobs = jobs_in(tmp_path / "sweep")
    for job in jobs[1:]:
        place_of(tmp_path / "sweep").start(job)
    (fake.folder / "refusal").write_text("sbatch: error: QOSMaxSubmitJobPerUserLimit")
    assert run_jobs(Queue(jobs), place_of(tmp_path / "sweep"), wait=False) == (0, jobs[1:])
    assert not jobs[0].folder.exists()


@pytest.mark.parametrize(
    ("limit", "seconds"),
    {
        "30": 1800,
        "30:15": 1815,
        "2:00:00": 7200,
        "1-12": 129_600,
        "1-00:30": 88_200,
        "1-00:00:01": 86_401,
        "UNLIMITED": None,
    }.items(),
)
def test_time_limits_are_read_as_slurm_reads_them(limit: str, seconds: int | None) -> None:
    assert slurm.seconds_of(limit) == seconds


def test_a_driver_that_does_not_wait_or_is_stopped_leaves_its_jobs(
    fake: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs = jobs_in(tmp_path / "sweep")
    place = place_of(tmp_path / "sweep", num_parallel=2)
    assert run_jobs(Queue(jobs), place, wait=False) == (0, jobs[:2])
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    signum, continuing = run_jobs(Queue(jobs), place_of(tmp_path / "sweep", num_parallel=2))
    assert (signum, continuing) == (signal.SIGINT, jobs[:2])
    assert len(fake.jobs()) == 2
    hint = f"SIGINT: 2 Slurm jobs continue. To cancel them, type: scancel --name={place.name}"
    assert hint in capfd.readouterr().out


TINY = ("data=synthetic", "model=mlp", "seed=1,2")


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        ("sweep.sbatch.time=30", 'sweep.sbatch.time="30"'),
        (
            "+sweep.sbatch.clusters=b",
            "sweep.sbatch.clusters: submit from a machine of that cluster",
        ),
        ("+sweep.sbatch.comment=a", "sweep.sbatch.comment: the sweep sets this option"),
        ("+sweep.sbatch.job-name=a", "sweep.sbatch.job_name: the sweep sets this option"),
        ("sweep.sbatch.time=00:05:00", "Use sweep.sbatch.signal=USR1@100"),
        ("sweep.sbatch.signal=null", "Add sweep.sbatch.signal=USR1@300"),
        ("sweep.sbatch.partition=a,b", "type 'sweep.sbatch.partition=\"a,b\"'"),
        ("+sweep.sbatch.qos=a,b", "type '+sweep.sbatch.qos=\"a,b\"'"),
        ("sweep=[optuna,slurm] sweep.num_trials=5,6", "only one value of sweep.num_trials"),
        ("sweep=slurm,grid", "type 'sweep=[slurm,grid]'"),
        ("trainer.num_nodes=2", "use sweep.sbatch.nodes"),
        ("sweep=[grid,slurm] sweep.jobs_per_gpu=2", "sweep=slurm locks each GPU"),
        ("sweep.time=3:00", "sweep.time"),
        ("", "this machine has no sbatch"),
    ],
)
def test_mistakes_of_a_slurm_sweep_leave_nothing(
    overrides: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    choice = () if overrides.startswith("sweep=") else ("sweep=slurm",)
    words = ("-m", *choice, *overrides.split(), *TINY, f"output_dir={tmp_path / 'out'}")
    said = refusal(*words)
    assert hint in said
    assert len(said.splitlines()) <= 2, said
    assert not (tmp_path / "out").exists()


def test_dry_run_prints_the_script_and_the_jobs_and_leaves_nothing(tmp_path: Path) -> None:
    """Also on a machine without Slurm, and without the GPUs of the cluster's machines."""
    out = f"output_dir={tmp_path / 'out'}"
    words = ("sweep.dry_run=true", "strategy=ddp", "trainer.devices=4", *TINY, out)
    for choice in "slurm", "[optuna,slurm]":
        result = command("train.py", "-m", f"sweep={choice}", *words)
        assert result.returncode == 0, result.stderr
        assert "#SBATCH --time=24:00:00" in result.stdout
        assert "srun --kill-on-bad-exit=1" in result.stdout
        assert not (tmp_path / "out").exists()
        words = (*words[:-3], "seed=1", "model.optimizer.lr=interval(0.001,0.1)", words[-1])
