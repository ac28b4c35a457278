import pynvml
import pytest

from project import devices


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 4), ("", 0), ("0", 1), ("2,3", 2), ("GPU-1,GPU-2", 2), ("0,9,1", 1), ("-1", 0)],
)
@pytest.mark.usefixtures("four_gpus")
def test_visible_gpus_are_counted(
    visible: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.num_gpus() == expected


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert devices.num_nvidia_gpus() == 0
