from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from harness.loggers.tensorboard import TensorBoard


@pytest.fixture
def logger(tmp_path: Path) -> TensorBoard:
    return TensorBoard(tmp_path, name="", version="tensorboard", flush_secs=120)


def steps_in_file(logger: TensorBoard) -> list[int]:
    """Of all events but the first, which holds the format's version."""
    (path,) = Path(logger.log_dir).glob("events.out.tfevents.*")
    return [event.step for event in list(EventFileLoader(str(path)).Load())[1:]]


def test_saving_does_not_wait_for_the_disk(
    logger: TensorBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning asks for it whenever it has logged."""
    monkeypatch.setattr(logger.experiment, "flush", None)  # fails where it is called
    logger.log_metrics({"loss": 0.5}, step=3)
    logger.save()
    monkeypatch.undo()
    logger.finalize("success")


def test_everything_is_in_the_one_file_before_a_checkpoint(logger: TensorBoard) -> None:
    for step in range(5):
        logger.log_metrics({"loss": 0.5}, step)
    logger.write_all()
    assert steps_in_file(logger) == [0, 1, 2, 3, 4]
    logger.finalize("success")
    assert len(list(Path(logger.log_dir).iterdir())) == 1
