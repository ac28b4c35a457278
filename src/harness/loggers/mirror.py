"""Mirrors of a run in trackers such as W&B, written in the background from the run's own logs.

A run that is killed computes the steps since its last checkpoint again, and most trackers take
nothing back: what they were told of these steps would be there twice. So nothing is sent as it is
logged. A mirror sends the rows of ``metrics.csv`` and TensorBoard's pictures once a checkpoint
stands behind them, and the rest when the run has ended: both logs are exact after any kill.
"""

import logging
import multiprocessing
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from harness.errors import UserError
from harness.files import write_durably
from harness.loggers import metrics_table
from harness.loggers.event_files import PREFIX, pictures_in
from harness.loggers.metrics_table import MetricsTable
from harness.loggers.rows import Row, values_in, without

log = logging.getLogger(__name__)

ID_FILE = "tracker_id"  # in a run's folder: under this id it is the same run in every tracker


class Known(NamedTuple):
    """How much of a run's logs may be sent; ``None`` is all that there is."""

    num_rows: int | None = None
    lengths: dict[str, int] | None = None  # of TensorBoard's files


EVERYTHING = Known()


@dataclass
class Label:
    """What a tracker shows of a run beside its points."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    notes: str = ""


class Mirror(Logger):
    """What is the same for all trackers; a subclass says how each of them takes it.

    Its thread calls ``begin``, ``held``, ``send``, ``show`` and ``end``, so that a tracker that
    does not answer holds no step up. Where one of them fails, it is told once, and what was not
    sent is sent with the next checkpoint.

    Attributes:
        package: of the tracker, which is an extra of the same name.
        project: under which the tracker keeps the run.
        takes_back: whether points can be taken out again, as where the tracker is a file.
        looked_at: the command that shows them; empty where a service does.
        wait_seconds: what the end of a run waits for the tracker.
    """

    package: ClassVar[str]
    project: str
    takes_back = True
    looked_at = ""
    wait_seconds = 60.0

    def prepare(self, run_dir: str | Path) -> None:
        """Say whose mirror this is; of ``__init__``.

        Raises:
            UserError: if the tracker is not installed.
        """
        if find_spec(self.package) is None:
            raise UserError(
                f"logger={self.package} needs {self.package}: pip install -e '.[{self.package}]'."
            )
        self.run_dir, self.label = Path(run_dir).absolute(), Label()
        self.known = Known(0, {})
        self.outbox: SimpleQueue[tuple[Known, str | None]] | None = None
        self.thread: threading.Thread | None = None
        self._forget()

    def _forget(self) -> None:
        self.counts: Counter[str] | None = None  # values of each name that the tracker has
        self.places: dict[str, int] = {}  # how far TensorBoard's files have been read
        self.has_sent = self.has_failed = False

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned process gets: nothing of a tracker's run, which it opens itself."""
        return self.__dict__ | {"outbox": None, "thread": None}

    def begin(self) -> None:
        """Open the tracker's run, or the one that an earlier start has opened."""
        raise NotImplementedError

    def held(self, rows: Sequence[Row]) -> Counter[str]:
        """How many values of each name the tracker has; others than in ``rows`` are taken out."""
        raise NotImplementedError

    def send(self, rows: Sequence[Row]) -> None:
        """Add points."""
        raise NotImplementedError

    def show(self, name: str, step: int, png: bytes) -> None:
        """Add a picture, which may be there from an earlier start."""
        raise NotImplementedError

    def end(self, status: str) -> None:
        """Close the tracker's run: ``"success"``, ``"failed"`` or ``"stopped"``."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """What the tracker keeps runs together by."""
        return self.project

    @property
    def version(self) -> str:
        """Unknown until the run begins."""
        return ""

    @property
    def id(self) -> str:
        """Of the run in every tracker; on the disk before the first use."""
        path = self.run_dir / ID_FILE
        if not path.exists():
            write_durably(path, os.urandom(16).hex().encode())
        return path.read_text()

    @rank_zero_only
    def commit(self, known: Known) -> None:
        """Let what a checkpoint stands behind be sent."""
        self.known = known
        self._put(known, None)

    @rank_zero_only
    def close(self, status: str, known: Known = EVERYTHING) -> None:
        """Send the rest, close the tracker's run, and wait for that."""
        self._put(known, status)
        assert self.thread is not None
        self.thread.join(self.wait_seconds)
        if self.thread.is_alive():
            log.warning(
                "%s has not taken everything within %.0f s; metrics.csv has it.",
                self.package,
                self.wait_seconds,
            )
        self.outbox = self.thread = None

    def _put(self, known: Known, status: str | None) -> None:
        if self.outbox is None:
            self._forget()
            self.outbox = SimpleQueue()
            self.thread = threading.Thread(target=self._work, args=(self.outbox,), daemon=True)
            self.thread.start()
        self.outbox.put((known, status))

    def _work(self, outbox: SimpleQueue[tuple[Known, str | None]]) -> None:
        status = None
        while status is None:
            known, status = outbox.get()
            while status is None and not outbox.empty():
                known, status = outbox.get()
            try:
                self._send(known)
                if status is not None:
                    self.end(status)
            except Exception as error:
                if not self.has_failed:
                    reason = str(error).partition("\n")[0]
                    log.warning("%s has failed, and the run goes on: %s", self.package, reason)
                log.info("The traceback:", exc_info=error)
                self.has_failed = True

    def _send(self, known: Known) -> None:
        rows = [
            (int(row.pop("step", 0)), row)
            for row in metrics_table.read(self.run_dir / "metrics.csv")[: known.num_rows]
        ]
        if self.counts is None:
            self.begin()
            self.counts = self.held(rows)
        if new := without(rows, self.counts):
            self.send(new)
            self.counts |= values_in(rows)
        for path in sorted(self.run_dir.glob(f"tensorboard/**/{PREFIX}*")):
            name = str(path.relative_to(self.run_dir / "tensorboard"))
            end = path.stat().st_size if known.lengths is None else known.lengths.get(name, 0)
            for tag, step, png in pictures_in(path, self.places.get(name, 0), end):
                self.show(tag, step, png)
            self.places[name] = max(end, self.places.get(name, 0))
        self.has_sent = True

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Leave numbers to the table, from which they come."""

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Leave them to the whole config, which has all of them."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Leave it to the end, when the best one is known."""

    def best(self) -> Path | None:
        """The best checkpoint."""
        path = self.run_dir / "checkpoints" / "best.ckpt"
        return path.resolve() if path.exists() else None

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Close after a failure; after a success more is to come, but for a spawned process."""
        if self.outbox is None:
            return  # nothing has begun
        if status == "success":
            if multiprocessing.parent_process() is not None:
                self.close(status)
            return
        is_failure = isinstance(sys.exc_info()[1], Exception)  # a signal's is none
        # What a checkpoint does not stand behind may be computed again.
        known = EVERYTHING if self.takes_back else self.known
        self.close("failed" if is_failure else "stopped", known)


def tell_mirrors(loggers: Iterable[Logger], cfg: DictConfig) -> None:
    """Give the mirrors a run's whole config, its name, tags and notes.

    Raises:
        UserError: if there is a mirror and no table that it shows.
    """
    loggers = list(loggers)
    mirrors = [logger for logger in loggers if isinstance(logger, Mirror)]
    if mirrors and not any(isinstance(logger, MetricsTable) for logger in loggers):
        word = mirrors[0].package
        raise UserError(
            f"logger.{word} shows what metrics.csv has, and logger.csv is missing.\n"
            f"Use logger={word}, or in a YAML file: override /logger: [default, {word}]."
        )
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    for mirror in mirrors:
        name = "-".join(mirror.run_dir.parts[-2:])
        tags = [str(tag) for tag in settings.get("tags") or []]
        mirror.label = Label(name, settings, tags, str(settings.get("notes") or ""))


def close_mirrors(loggers: Iterable[Logger]) -> dict[str, str]:
    """Let the mirrors have all of a run that has ended; how each is looked at."""
    loggers = list(loggers)
    mirrors = [logger for logger in loggers if isinstance(logger, Mirror)]
    for logger in loggers if mirrors else []:
        getattr(logger, "write_all", logger.save)()
    for mirror in mirrors:
        mirror.close("success")
    return {mirror.package: mirror.looked_at for mirror in mirrors if mirror.looked_at}


def place_of(run_dir: Path, folder: str | Path, name: str) -> Path:
    """The folder beside runs that holds what they share; where they were moved, the one there.

    Args:
        run_dir: of a run.
        folder: as it was when the run began.
        name: of what it holds.
    """
    before = Path(folder).absolute()
    if run_dir.is_relative_to(before):
        return before
    return next((parent for parent in run_dir.parents if (parent / name).exists()), before)
