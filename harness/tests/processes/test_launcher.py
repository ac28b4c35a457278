"""What torchrun and Slurm tell; under the real ones: tests/cluster."""

import os
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from harness.errors import UserError
from harness.processes.launcher import Launcher, environments, global_rank, launcher
from harness.processes.parent import OF_LAUNCHERS
from harness.strategies.launchable import check_launcher

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch):
    """What a process knows with some variables, and none of who has started the tests."""

    def tell(environment: dict[str, str]) -> Launcher:
        for name in filter(OF_LAUNCHERS.fullmatch, list(os.environ)):
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return launcher()

    return tell


def test_what_torchrun_and_slurm_tell_is_read(told) -> None:
    again = Launcher("torchrun", 3, 1, 4, 2, 2, is_again=True)
    torchrun, srun = replace(again, is_again=False), Launcher("srun", 3, 1, 4, 2, 2)
    first = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0"}
    made_up = "3a3dfbb1-21d6-4c01-9b8c-8ddc5e1b8b1e"  # by --standalone
    part = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    for environment, expected in (
        ({}, Launcher()),
        (TORCHRUN, again),
        (first, torchrun),
        (first | {"TORCHELASTIC_RUN_ID": "a/b"}, replace(again, job="torchrun_a_b")),
        (first | {"TORCHELASTIC_RUN_ID": made_up}, torchrun),
        (SRUN, replace(srun, job="slurm_12")),
        (SRUN | {"SLURM_STEP_ID": "1"}, replace(srun, job="slurm_12")),
        (BATCH, Launcher(job="slurm_12")),
        (BATCH | ARRAY, Launcher(job="slurm_10_2", task="2")),
        (BATCH | {"SLURM_RESTART_COUNT": "2"}, Launcher(is_again=True, job="slurm_12")),
        (SRUN | TORCHRUN, replace(again, job="slurm_12")),
        (SRUN | first, replace(torchrun, job="slurm_12", num_torchruns=4)),
        (part, Launcher("srun", 1, 0, 2, 2, 1, "slurm_1")),
    ):
        known = told(environment)
        assert known == expected, environment
        assert global_rank() == expected.rank


def test_steps_and_jobs_meet_at_ports_of_their_own(told) -> None:
    first = told(SRUN).address
    assert first[0] == "node07"
    others = {told(SRUN | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).address[1]
              for job, step in (("12", "1"), ("13", "0"), ("112", "0"))}  # fmt: skip
    assert len(others | {first[1]}) == 4
    assert told({"MASTER_ADDR": "here", "MASTER_PORT": "1234"}).address == ("here", 1234)


def test_first_node_is_read_as_slurm_writes_it(told) -> None:
    names = {"n1": "n1", "n[3-5],x": "n3", "n[03,7],x": "n03", "n[1-2]-ib": "n1-ib", "a,b": "a"}
    for text, name in names.items():
        assert told(SRUN | {"SLURM_STEP_NODELIST": text}).address[0] == name


def test_lightning_is_told_of_a_step_and_that_a_batch_script_is_alone(told) -> None:
    told(SRUN)
    (step,) = environments()
    assert (step.world_size(), step.global_rank(), step.local_rank()) == (4, 3, 1)
    assert (step.node_rank(), step.creates_processes_externally) == (1, True)
    assert (step.main_address, step.main_port) == ("node07", 15120)
    told(BATCH)
    (alone,) = environments()
    assert not alone.creates_processes_externally
    told({})
    assert environments() == []


TWO = Launcher("srun", num_processes=2, num_here=2)
NODES = Launcher("torchrun", num_processes=2, num_nodes=2)
DDP, DDP2, DP = (
    {"strategy": {"_target_": f"harness.{name}"}, "num_nodes": 1}
    for name in ("DDPStrategy", "DDP2Strategy", "DataParallelStrategy")
)


@pytest.mark.parametrize(
    ("known", "trainer", "says"),
    [
        (TWO, {"strategy": "auto", "devices": 1}, "2 processes, .* 1 on a machine. Use .*ddp"),
        (TWO, DP | {"devices": 2}, "and this takes 1"),
        (TWO, DDP | {"devices": 3}, "2 processes, and this takes 3"),
        (TWO, DDP2 | {"devices": 2}, "and this takes 1"),
        (Launcher(), {"strategy": "ddp_spawn", "devices": 2}, "Use strategy=ddp or dp"),
        (Launcher(), DP | {"devices": 2, "num_nodes": 2}, "trainer.num_nodes=2.*Use ddp2"),
        (Launcher(), DP | {"devices": 2, "sync_batchnorm": True}, "trainer.sync_batchnorm"),
        (Launcher(), DDP2 | {"devices": 2, "sync_batchnorm": True}, "Use strategy=ddp, or"),
        (Launcher(), DDP2 | {"devices": 2, "num_nodes": 2}, "several machines need .*MASTER_ADDR"),
        (NODES, DDP | {"devices": 1, "num_nodes": 3}, "num_nodes=3, but torchrun runs on 2"),
        (Launcher("srun", num_processes=3, num_here=1, num_nodes=2),
         DDP | {"devices": 1, "num_nodes": 2}, "3 processes, and this takes 1"),
        (Launcher("torchrun"), DDP | {"devices": 2}, "1 processes, and this takes 2"),
        (
            Launcher("torchrun", num_processes=2, num_here=2, num_torchruns=2),
            DDP | {"devices": 2},
            "several torchruns on each machine",
        ),
    ],
)  # fmt: skip
def test_what_disagrees_with_the_launcher_is_a_sentence(
    known: Launcher, trainer: dict[str, object], says: str
) -> None:
    cfg = OmegaConf.create({"num_nodes": 1, "accelerator": "cpu"} | trainer)
    with pytest.raises(UserError, match=f"(?s){says}"):
        check_launcher(cfg, known)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "not by torchrun or srun"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "^OMPI.* not by torchrun or srun",
        ),
        ({"NODE_RANK": "1"}, "several machines need"),
    ],
)
def test_process_that_nobody_has_told_enough_is_refused(environment, says: str, told) -> None:
    known = told(environment)
    with pytest.raises(UserError, match=says):
        check_launcher(OmegaConf.create(DDP | {"devices": 1, "accelerator": "cpu"}), known)
