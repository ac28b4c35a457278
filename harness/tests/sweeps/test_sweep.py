"""A sweep as a user types it, with runs that train."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.command import run_folder, sweep
from harness.command.compose import compose_command
from harness.sweeps.queue import Study, note_failure
from harness.testing import command as typed
from tests.conftest import ROOT, slow
from tests.devices.fake_nvml import FakeGpu, write_fake
from tests.faults import fork_server
from tests.faults.fork_server import command
from tests.faults.run_folder import only
from tests.refusals import refusal

TINY = ("data=synthetic", "model=mlp", "strategy=cpu", "trainer.max_epochs=1", "watch=none")
TINY += ("data.num_train=640", "notes=${name}")  # which only a run can tell
GRID = ("model.optimizer.lr=0.001,0.01", "seed=1,2")


def sweeps(folder: Path) -> list[Path]:
    return sorted(folder.glob("sweeps/*/*"))


def again(folder: Path, *overrides: str) -> tuple[int, str]:
    result = command("train.py", "-m", *overrides, f"output_dir={folder}")
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a grid of four runs, two at a time."""
    folder = tmp_path_factory.mktemp("swept")
    status, said = again(folder, *TINY, *GRID, "sweep.num_parallel=2")
    assert status == 0, said
    assert "4 jobs in" in said
    assert said.rstrip().endswith("4 finished")
    return only(only(folder / "sweeps"))


def test_a_grid_is_numbered_in_hydras_order(swept: Path) -> None:
    overrides = [run_folder.load_overrides(swept / str(number))[-3:-1] for number in range(4)]
    rates = ("model.optimizer.lr=0.001", "model.optimizer.lr=0.01")
    assert overrides == [[rate, f"seed={seed}"] for rate in rates for seed in (1, 2)]


def test_same_words_go_on_with_a_sweep_and_others_start_another(swept: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in swept.glob("*/results.json")}
    status, said = again(swept.parents[2], "resume=auto", *TINY, *GRID)
    assert status == 0, said
    assert "0 to run" in said
    assert {path: path.stat().st_mtime_ns for path in swept.glob("*/results.json")} == before
    assert sweep._find_sweep(swept.parent, ["seed=1,2"]) is None
    assert sweeps(swept.parents[2]) == [swept]


def test_failed_jobs_keep_their_folders_with_the_reason(tmp_path: Path) -> None:
    """The reason is the line below the job."""
    overrides = [*TINY, "model.optimizer.lr=-1,0.01,fast"]
    status, said = again(tmp_path, *overrides)
    assert status == 1
    (folder,) = sweeps(tmp_path)
    assert "job 0 failed" in said
    lines = said.splitlines()
    places = [next(n for n, x in enumerate(lines) if x.endswith(f"  {i}")) for i in range(3)]
    assert lines[places[0]].startswith("failed")
    assert "    model.optimizer: Invalid learning rate: -1" in lines[places[0] + 1]
    assert lines[places[2]].startswith("failed")
    assert f"Resume with: python train.py -m resume=auto {' '.join(TINY[:3])}" in said
    assert "Invalid learning rate: -1" in (folder / "0" / "screen.log").read_text()
    assert (folder / "1" / "results.json").exists()
    status, said = again(tmp_path, "resume=auto", *overrides)
    assert status == 1
    assert "2 to run" in said
    assert (folder / "0" / "screen.log").read_text().count("train: ") == 2


RATE = "model.optimizer.lr=tag(log,interval(1e-4,1e-2))"


@pytest.mark.parametrize(
    ("overrides", "hint"),
    {
        "-m trainer.devcies=1,2": "Did you mean trainer.devices?",
        "-m seed=1,2 model.optimizer.lr=interval(0,1)": "sweep=optuna",
        "-m seed=1,2 sweep.num_parallel=0": "sweep.num_parallel=0 must be",
        "-m seed=1,2 sweep.jobs_per_gpu=0": "sweep.jobs_per_gpu=0 must be",
        "-m seed=1,2 gpus=emptiest sweep.jobs_per_gpu=2": "sweep.jobs_per_gpu=2 lets jobs share",
        "-m seed=1,2 resume=outputs/x": "-m finds a sweep by its overrides. Use python",
        "-m sweep=optuna seed=1": "sweep=optuna has nothing to choose",
        "-m sweep=optuna model.optimizer.lr=interval(1,0)": "model.optimizer.lr=interval(1,0): ",
        f"-m sweep=optuna {RATE} +sweep.sampler.no=1": "sweep.sampler=optuna",
        f"-m sweep=optuna {RATE} sweep.storage=x://me:secret@y": "sweep.storage: ",
        "-m model=glob(*)": "is not a list of values",
        f"-m sweep=optuna {RATE} sweep.num_trials=0": "must be a whole number, 1 or more",
        "-m seed=1,2 hydra/launcher=slurm": "python train.py -m <overrides> for sweeps",
        "seed=1 sweep.num_parallel=2": "train.py -m sweep.num_parallel=2",
    }.items(),
)
def test_mistake_leaves_nothing(overrides: str, hint: str, tmp_path: Path) -> None:
    if "optuna " in overrides:
        pytest.importorskip("optuna")
    said = refusal(*overrides.split(), *TINY, f"output_dir={tmp_path / 'out'}")
    assert hint in said
    assert "secret" not in said
    assert len(said.splitlines()) <= 2, said
    assert not (tmp_path / "out").exists()


def test_only_trainings_are_swept_and_something_is_to_try() -> None:
    for overrides in ("-m",), ("-m", "resume=auto"):
        assert "nothing to try" in refusal(*overrides)
    assert "-m is for train.py" in refusal("-m", "checkpoint=a,b", task="evaluate")


def slots(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, *overrides: str, visible: str | None = None
) -> tuple[list[str | None], str]:
    """The GPUs of the jobs that run at a time on a machine with so many, and why they are fewer."""
    command = compose_command("train", ["strategy=ddp", "trainer.devices=1", *overrides])
    command.cfg.trainer.accelerator = "gpu"
    monkeypatch.setattr(sweep, "num_gpus", lambda: num_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, why = sweep._choose_slots(command)
    return [slot.gpus for slot in found], why


def test_each_job_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    five, two = ("trainer.devices=2", "gpus=emptiest"), "7,3,5,1,2"
    assert slots(monkeypatch, 5, five[0], visible=two) == (["7,3", "5,1"], "")
    assert slots(monkeypatch, 5, *five, visible=two) == ([None, None], "")


def test_jobs_that_share_gpus_fill_each_before_any_has_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_gpus, devices, per_gpu, parallel, expected in (
        (2, 1, 2, "auto", ["0", "1", "0", "1"]),
        (2, 1, 3, 3, ["0", "1", "0"]),
        (1, 1, 1, 3, ["0"]),
        (5, 2, 2, "auto", ["0,1", "2,3", "0,1", "2,3"]),
        (2, "auto", 2, "auto", ["0,1", "0,1"]),
    ):
        overrides = (f"trainer.devices={devices}", f"sweep.num_parallel={parallel}")
        assert (
            slots(monkeypatch, num_gpus, *overrides, f"sweep.jobs_per_gpu={per_gpu}")[0] == expected
        )
    # A project's own sweep/grid.yaml may lack the key.
    assert slots(monkeypatch, 2, "~sweep.jobs_per_gpu")[0] == ["0", "1"]


def test_the_start_says_why_fewer_jobs_run_than_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def why(num_gpus: int, *overrides: str) -> str:
        return slots(monkeypatch, num_gpus, *overrides)[1]

    three, shared = "sweep.num_parallel=3", "sweep.jobs_per_gpu=2"
    hint = "sweep.jobs_per_gpu=3 runs 3 at a time."
    assert why(1, three) == f", not 3: each job uses 1 of 1 GPU alone. {hint}"
    assert why(1, three, shared) == f", not 3: each job uses 1 of 1 GPU with 1 other. {hint}"
    two = ", not 3: each job uses 2 of 5 GPUs alone. sweep.jobs_per_gpu=2 runs 3 at a time."
    assert why(5, three, "trainer.devices=2") == two
    assert why(2, three, "gpus=emptiest") == ", not 3: each job uses 1 of 2 GPUs alone."
    for overrides in (shared,), ("sweep.num_parallel=1",), (three, "sweep.jobs_per_gpu=3"):
        assert why(1, *overrides) == ""
    on_cpu = ": no job uses a GPU, and sweep.jobs_per_gpu is for GPUs. sweep.num_parallel=2 runs"
    assert on_cpu in why(0, shared)
    assert why(0, three, shared) == ""


@pytest.mark.ci
def test_jobs_share_a_gpu_at_the_same_time(tmp_path: Path) -> None:
    """torch knows that there is no GPU, and computes on the CPU."""
    overrides = [word for word in TINY if not word.startswith(("strategy=", "notes="))]
    overrides += [
        "notes=GPU ${oc.env:CUDA_VISIBLE_DEVICES,none}",
        "seed=1,2,3",
        "sweep.num_parallel=3",
    ]
    overrides += ["sweep.jobs_per_gpu=2", f"output_dir={tmp_path}"]
    fake = write_fake(tmp_path / "fake", [FakeGpu(80)])
    result = typed(
        "train.py", "-m", *overrides, environment=fake
    )  # the fork server has no fake GPUs
    assert result.returncode == 0, result.stderr
    assert (
        "3 to run, at most 2 at a time, not 3: each job uses 1 of 1 GPU with 1 other."
        in result.stdout
    )
    events = re.findall(r"job (\d) (starts|finished)", result.stdout)
    assert events[:2] == [("0", "starts"), ("1", "starts")]
    assert events[2][1] == "finished"
    (folder,) = sweeps(tmp_path)
    assert {run_folder.load_config(folder / job).notes for job in "012"} == {"GPU 0"}


def test_study_counts_failed_trials_and_goes_on_for_more(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    sampler = (
        "sweep.sampler._target_=optuna.samplers.BruteForceSampler",
        "~sweep.sampler.constant_liar",
    )
    overrides = ("resume=auto", *TINY, "sweep=optuna", *sampler, "model.optimizer.lr=-1,0.01")
    for num_trials in (1, 2):
        status, said = again(tmp_path, *overrides, f"sweep.num_trials={num_trials}")
        assert f"{num_trials} jobs in" in said
    assert status == 1, said
    (folder,) = sweeps(tmp_path)
    (study,) = optuna.get_all_study_names(url := f"sqlite:///{folder}/study.db")
    trials = optuna.load_study(study_name=study, storage=url).trials
    assert {trial.state.name for trial in trials} == {"COMPLETE", "FAIL"}
    (value,) = (trial.value for trial in trials if trial.value is not None)
    assert f"{value:.5g}" in said  # by its job, or in the table of an earlier one


def test_a_trial_that_failed_without_a_driver_is_failed_in_the_study(tmp_path: Path) -> None:
    """And the study suggests another one in its place."""
    pytest.importorskip("optuna")
    settings = {"num_trials": 2, "storage": None}
    settings["sampler"] = {"_target_": "optuna.samplers.RandomSampler"}
    overrides = OverridesParser.create().parse_overrides(["a=interval(0,1)"])
    first = Study(settings, "min", overrides).open(tmp_path)
    job = first.next()
    assert job is not None
    job.folder.mkdir()
    note_failure(job, "exit 1")
    second = Study(settings, "min", overrides).open(tmp_path)
    other = second.next()
    assert other is not None
    assert other.number == 1
    assert [trial.state.name for trial in second.study.trials] == ["FAIL", "RUNNING"]


def started(folder: Path, *overrides: str) -> fork_server.Started:
    return fork_server.Started(
        ["train.py", "-m", *overrides, f"output_dir={folder}"], folder / "log"
    )


def test_ctrl_c_saves_and_the_sweep_goes_on(tmp_path: Path) -> None:
    overrides = (*TINY, "trainer.max_epochs=60,1")
    driver = started(tmp_path, *overrides)
    end = time.monotonic() + 200
    while not [*tmp_path.glob("sweeps/*/*/0/metrics.csv")] and time.monotonic() < end:
        time.sleep(0.02)
    driver.send_signal(signal.SIGINT)
    assert driver.wait() == 128 + signal.SIGINT
    (folder,) = sweeps(tmp_path)
    assert "Resume with: python train.py -m resume=auto" in (tmp_path / "log").read_text()
    assert [*(folder / "0" / "checkpoints").glob("step_*.ckpt")]
    assert not (folder / "1").exists()
    status, said = again(tmp_path, "resume=auto", *overrides)
    assert status == 0, said
    assert "resumes from " in (folder / "0" / "screen.log").read_text()
    assert {path.parent.name for path in folder.glob("*/results.json")} == {"0", "1"}


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["study", *slow("grid")])
def test_kills_change_no_result(kind: str, tmp_path: Path) -> None:
    """After kill -9 of the driver or of a job, each job equals a single run of its overrides."""
    overrides = [
        *TINY,
        "trainer.max_epochs=5",
        "checkpoint.every_n_steps=3",
        "sweep.num_parallel=2",
    ]
    url = f"sqlite:///{tmp_path}/shared.db"
    study = ["sweep=optuna", "sweep.num_trials=4", RATE, f"sweep.storage={url}"]
    overrides += GRID if kind == "grid" else study
    draw, status = random.Random(1), 1
    for num_starts in range(20):
        driver = started(tmp_path, *overrides, "resume=auto")
        end = time.monotonic() + draw.random() * 6
        while driver.poll() is None and (time.monotonic() < end or num_starts >= 6):
            time.sleep(0.01)
        if driver.poll() is None:
            children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
            is_job = children and draw.random() < 0.5
            os.kill(int(draw.choice(children)) if is_job else driver.pid, signal.SIGKILL)
        if (status := driver.wait()) == 0:
            break
    assert status == 0, (tmp_path / "log").read_text()[-2000:]
    # A driver that was killed before it wrote its overrides has left a folder that is no sweep.
    (folder,) = [place for place in sweeps(tmp_path) if (place / "overrides.yaml").exists()]
    # A kill while the sampler draws a trial's values fails that trial: the study asks for the
    # next number in its place, so that four jobs end, of which the last may be number 4 or more.
    jobs = sorted(path.parent for path in folder.glob("*/results.json"))
    assert len(jobs) == 4
    assert kind == "study" or {job.name for job in jobs} == set("0123")
    for job in jobs:
        place = tmp_path / f"single_{job.name}"
        assert "has finished" not in (job / "screen.log").read_text()  # started once more
        first = [
            word for word in run_folder.load_overrides(job) if not word.startswith("output_dir=")
        ]
        result = command("train.py", *first, f"output_dir={place}")
        assert result.returncode == 0, result.stderr
        for name in ("results.json", "metrics.csv"):
            assert (job / name).read_bytes() == (only(only(place)) / name).read_bytes()


@pytest.mark.parametrize("repeats", ["seed=1,2,3", "+data.fold=range(3)", "data.seed=choice(1,2)"])
def test_optuna_chooses_no_repetition(repeats: str) -> None:
    rate = "model.optimizer.lr=interval(1e-4,1e-1)"
    said = refusal("-m", "sweep=optuna", rate, repeats)
    assert f"{repeats}: sweep=optuna would choose the luckiest " in said


def with_space(tmp_path: Path, *lines: str) -> Path:
    """Config files with a search space."""
    conf = Path(shutil.copytree(ROOT / "conf", tmp_path / "conf"))
    (conf / "sweep").mkdir()
    text = "\n".join(["defaults: [grid]", "params:", *(f"  {line}" for line in lines)])
    (conf / "sweep" / "mine.yaml").write_text(text)
    return conf


def test_a_search_space_is_kept_in_a_yaml_file(tmp_path: Path, monkeypatch) -> None:
    conf = with_space(tmp_path, "model.optimizer.lr: [0.001, 0.01]", "seed: 1,2", "tags: '[a],[b]'")
    queues = []
    monkeypatch.setattr(sweep, "run_jobs", lambda queue, *_: queues.append(queue) or (1, []))
    overrides = ["sweep=mine", "tags=[c]", f"output_dir={tmp_path}"]
    with pytest.raises(SystemExit):
        sweep.run("train", conf, overrides)
    overrides = [
        [f"model.optimizer.lr={r}", f"seed={s}"] for r in ("0.001", "0.01") for s in (1, 2)
    ]
    assert [job.overrides[:2] for job in queues[0].jobs] == overrides
    assert all("tags=[c]" in job.overrides for job in queues[0].jobs)


@pytest.mark.parametrize("key", ["checkpoint.trusted: true", "hydra.searchpath: [a]", "~seed: 1"])
def test_a_search_space_sets_nothing_that_only_a_user_types(tmp_path: Path, key: str) -> None:
    said = refusal("-m", "sweep=mine", conf=with_space(tmp_path, key))
    assert "can only be typed in the command" in said


def test_a_mistake_in_a_later_job_is_found_before_the_first_has_trained(tmp_path: Path) -> None:
    for word in ("model=mlp,mpl", "compile=false,maybe", "seed=1,2,x"):
        said = refusal("-m", word, f"output_dir={tmp_path}")
        assert "Did you mean model=mlp?" in said or "must be" in said
    assert not [*tmp_path.iterdir()]
