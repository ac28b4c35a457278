import itertools

import pytest

from harness.command import validate
from harness.command.compose import compose_command
from harness.doctor.examine import is_busy, recommend
from harness.machine import locks, nvml
from tests_harness.conftest import ROOT
from tests_harness.machine.fake_nvml import FakeGpu

USUAL = {
    "num_visible": 4,
    "num_gpus": 4,
    "num_busy": 0,
    "nccl_works": True,
    "num_cores": 32,
    "workers_can_share": True,
}
NO_GPU = {"num_visible": 0, "num_gpus": 0, "nccl_works": False}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({}, "strategy=ddp trainer.devices=4 data.num_workers=7 data.pin_memory=true"),
        (
            {"num_busy": 2},
            "strategy=ddp gpus=emptiest trainer.devices=2 data.num_workers=8 data.pin_memory=true",
        ),
        (
            {"num_busy": 4},
            "strategy=gpu gpus=emptiest trainer.devices=1 data.num_workers=8 data.pin_memory=true",
        ),
        (
            {"nccl_works": False},
            "strategy=gpu gpus=emptiest trainer.devices=1 data.num_workers=8 data.pin_memory=true",
        ),
        (
            {"num_gpus": 1, "num_visible": 1, "num_cores": 4, "nccl_works": False},
            "strategy=gpu trainer.devices=1 data.num_workers=3 data.pin_memory=true",
        ),
        (
            {"num_cores": 3},
            "strategy=ddp trainer.devices=4 data.num_workers=0 data.pin_memory=true",
        ),
        (
            {"workers_can_share": False},
            "strategy=ddp trainer.devices=4 data.num_workers=0 data.pin_memory=true",
        ),
        (NO_GPU, "strategy=auto trainer.devices=1 data.num_workers=0 data.pin_memory=false"),
        (
            NO_GPU | {"num_visible": 2},  # torch cannot use them
            "strategy=cpu trainer.devices=1 data.num_workers=0 data.pin_memory=false",
        ),
    ],
)
def test_settings_follow_from_what_was_seen(seen, expected: str) -> None:
    assert " ".join(recommend(**USUAL | seen)) == expected


def test_every_recommendation_composes_and_passes_the_checks(machine) -> None:
    lines = {}
    for num_gpus, is_half_busy, nccl_works in itertools.product((0, 1, 4), *[(True, False)] * 2):
        words = recommend(4, num_gpus, num_gpus // 2 * is_half_busy, nccl_works, 16, True)
        lines[" ".join(words)] = words
    words = recommend(0, 0, 0, False, 2, True)
    lines[" ".join(words)] = words
    assert len(lines) == 6
    machine(*[FakeGpu(80)] * 4)
    for words in lines.values():
        validate.check(compose_command("train", words, ROOT / "conf"))


def test_busy_is_taken_or_half_full(machine, own_locks) -> None:
    machine(FakeGpu(39), FakeGpu(41), FakeGpu(80), FakeGpu(0, memory_unknown=True))
    assert locks.acquire("GPU-22ab-cdef")
    assert [is_busy(gpu) for gpu in nvml.gpus()] == [True, False, True, False]
