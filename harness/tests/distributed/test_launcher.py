"""Variables of torchrun and Slurm; tests/cluster runs the real programs."""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from harness.distributed.launcher import Launcher, environments, global_rank, launcher
from harness.distributed.parent_process import OF_LAUNCHERS
from harness.errors import UserError
from harness.strategies.launch_checks import check_launcher

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
}  # fmt: skip
AGAIN = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
NAMED = TORCHRUN | {"TORCHELASTIC_RUN_ID": "a/b"}
STANDALONE = TORCHRUN | {"TORCHELASTIC_RUN_ID": "3a3dfbb1-21d6-4c01-9b8c-8ddc5e1b8b1e"}
SRUN = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash"}
ARRAY = BATCH | {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}
Tell = Callable[[dict[str, str]], Launcher]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Return a process's view of some variables, without those of the tests' own launcher."""

    def tell(environment: dict[str, str]) -> Launcher:
        for name in filter(OF_LAUNCHERS.fullmatch, list(os.environ)):
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return launcher()

    return tell


def test_what_torchrun_and_slurm_tell_is_read(told: Tell) -> None:
    torchrun, srun = (Launcher(name, 3, 1, 4, 2, 2) for name in ("torchrun", "srun"))
    for environment, expected in (
        ({}, Launcher()),
        (TORCHRUN, torchrun),
        (AGAIN, replace(torchrun, may_be_restart=True)),
        (NAMED, replace(torchrun, may_be_restart=True, job="torchrun_a_b")),
        (STANDALONE, torchrun),
        (SRUN, replace(srun, job="slurm_12")),
        (BATCH, Launcher(job="slurm_12")),
        (ARRAY, Launcher(job="slurm_10_2", task="2")),
        (BATCH | {"SLURM_RESTART_COUNT": "2"}, Launcher(may_be_restart=True, job="slurm_12")),
        (SRUN | AGAIN, replace(torchrun, may_be_restart=True, job="slurm_12")),
        (SRUN | TORCHRUN, replace(torchrun, job="slurm_12", num_torchruns=4)),
    ):
        assert told(environment) == expected, environment
        assert global_rank() == expected.rank


def test_tasks_meet_at_the_first_node_and_at_a_port_of_their_step(told: Tell) -> None:
    names = {"n1": "n1", "n[3-5],x": "n3", "n[03,7],x": "n03", "n[1-2]-ib": "n1-ib", "a,b": "a"}
    for text, name in names.items():
        assert told(SRUN | {"SLURM_STEP_NODELIST": text}).address == (name, 15120)
    steps = [("12", "0"), ("12", "1"), ("13", "0"), ("112", "0")]
    variables = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job, step in steps]
    assert len({told(SRUN | step).address for step in variables}) == 4
    assert told({"MASTER_ADDR": "here", "MASTER_PORT": "1234"}).address == ("here", 1234)


def test_lightning_is_told_of_a_step_and_that_a_batch_script_is_alone(told: Tell) -> None:
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


DDP, DDP2, DP = (
    {"strategy": {"_target_": f"harness.{name}"}, "devices": 2}
    for name in ("DDPStrategy", "DDP2Strategy", "DataParallelStrategy")
)
DDP_1, TWO_NODES, SYNC = DDP | {"devices": 1}, {"num_nodes": 2}, {"sync_batchnorm": True}
TASKS = {"SLURM_STEP_NUM_TASKS": "2"}
UNEVEN = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "2"}
ALONE = {"TORCHELASTIC_RUN_ID": "x"}
HOSTS = ALONE | {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
TWICE = ALONE | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} | TASKS
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "trainer", "says"),
    [
        (TASKS, {"strategy": "auto", "devices": 1}, "2 processes, .* 1 per machine.*Use .*ddp"),
        (TASKS, DP, "these settings need 1"),
        (TASKS, DDP | {"devices": 3}, "2 processes, but these settings need 3"),
        (TASKS, DDP2, "these settings need 1"),
        (UNEVEN, DDP_1 | TWO_NODES, "3 processes, but these settings need 1"),
        (ALONE, DDP, "1 processes, but these settings need 2"),
        (ALONE, DDP | {"devices": [0, 1, 2]}, "1 processes, but these settings need 3"),
        (HOSTS, DDP_1 | {"num_nodes": 3}, "num_nodes=3, but torchrun runs on 2"),
        (TWICE, DDP, "several torchruns on each machine"),
        ({}, {"strategy": "ddp_spawn", "devices": 2}, "Use strategy=ddp or dp"),
        ({}, DP | TWO_NODES, "trainer.num_nodes=2.*Use strategy=ddp2"),
        ({}, DP | SYNC, "trainer.sync_batchnorm"),
        ({}, DDP2 | SYNC, "Use strategy=ddp, or"),
        ({}, DDP2 | TWO_NODES, "several machines need .*MASTER_ADDR"),
        ({"NODE_RANK": "1"}, DDP_1, "several machines need"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, DDP_1, "^RANK .*not by torchrun or srun"),
        (OPEN_MPI, DDP_1, "^OMPI.* not by torchrun or srun"),
    ],
)
def test_what_disagrees_with_the_launcher_is_a_sentence(
    environment: dict[str, str], trainer: dict[str, object], says: str, told: Tell
) -> None:
    known = told(environment)
    with pytest.raises(UserError, match=f"(?s){says}"):
        check_launcher(OmegaConf.create({"num_nodes": 1, "accelerator": "cpu"} | trainer), known)
