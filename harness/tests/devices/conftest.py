import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import devices as choice
from tests.devices.fake_nvml import FakeGpu, FakeNvml


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Let this process find the GPUs that a test names, all of them visible."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*gpus: FakeGpu, error: int = 0) -> FakeNvml:
        nvml = FakeNvml(list(gpus), error)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


@pytest.fixture
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Keep the test's locks apart from those of the machine."""
    prefix = f"{tmp_path.name}_{os.getpid()}_"
    monkeypatch.setattr(choice, "PREFIX", prefix)
    yield prefix
    choice.release()
