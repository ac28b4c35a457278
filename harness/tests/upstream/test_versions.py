"""One place knows which versions were tested; with others a run says so, or is refused by name."""

import logging
import queue
import re
from logging.handlers import QueueHandler

import pytest
import pytorch_lightning as pl

from harness.errors import UserError
from harness.upstream import versions
from tests.conftest import LIBRARY
from tests.upstream.test_private_names import NAMES, remove, trainer

__all__ = ["trainer"]

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says of a Trainer


def install(monkeypatch: pytest.MonkeyPatch, package: str, number: str) -> None:
    real = versions.version
    monkeypatch.setattr(versions, "version", lambda name: number if name == package else real(name))
    monkeypatch.setattr(versions, "untested", versions.untested.__wrapped__)


def test_bounds_are_those_of_the_project() -> None:
    text = (LIBRARY / "requirements.txt").read_text()
    for package, bounds in versions.TESTED.items():
        assert f"{package}{bounds}\n" in text


def test_other_version_is_said_once(trainer: pl.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    package, number = "torch", "2.14.0.dev20270101"
    install(monkeypatch, package, number)
    # A handler of the logger's own: where its records go besides, an earlier run has decided.
    told: queue.Queue[logging.LogRecord] = queue.Queue()
    logger = logging.getLogger(versions.__name__)
    monkeypatch.setattr(logger, "handlers", [QueueHandler(told)])
    versions.warn_once.cache_clear()
    versions.check(trainer)
    versions.check(trainer)
    line = told.get_nowait().getMessage()
    assert told.empty()
    assert f"{package} {number} was not tested" in line
    assert f"pip install '{package}{versions.TESTED[package]}'" in line


NEEDED = [name for file, name in NAMES if file in versions.NEEDED]


def test_version_without_a_needed_name_is_refused_by_it(
    trainer: pl.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "pytorch-lightning", "2.7.0")
    for name in ["trainer:fit_loop.epoch_loop._batches_that_stepped", *NEEDED[:: len(NEEDED) // 6]]:
        with pytest.MonkeyPatch.context() as patch:
            remove(name, trainer, patch)
            last = re.split("[.:]", name)[-1]
            with pytest.raises(UserError, match=rf"2.7.0 lacks .*\W{last}\b") as refused:
                versions.check(trainer)
        assert len(str(refused.value).splitlines()) <= 3
