"""Trackio, in a folder beside the runs."""

import os
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import DummyLogger

from harness.errors import UserError
from harness.loggers.mirror import Mirror, place_of
from harness.loggers.rows import Row, is_beginning, values_in
from harness.places import shown

RESERVED = re.compile("project|run|timestamp|step|time|metrics")  # Trackio's own names


class Trackio(Mirror):
    """A run in Trackio, whose points come from ``metrics.csv``: see ``mirror``.

    What a run logs is written into Trackio's store directly: its own queue loses what it holds when
    the process is killed, tells no errors, and asks a service for the user's name.

    Args:
        run_dir: the run's folder.
        folder: Trackio's store; ``TRACKIO_DIR=<folder> trackio show`` opens its page.
        project: of Trackio.
        log_model: keep the best checkpoint as an artifact.
    """

    package = "trackio"

    def __init__(
        self, run_dir: str, folder: str, project: str = "lightning", log_model: bool = False
    ) -> None:
        self.prepare(run_dir)
        store = Path(folder)
        self.folder = place_of(self.run_dir, store.parent, store.name) / store.name
        self.project, self.logs_model = project, log_model
        self.looked_at = f"TRACKIO_DIR={shown(self.folder)} trackio show"

    @property
    def store(self) -> Any:
        """Trackio's functions for its store, which it chooses when it is imported."""
        os.environ["TRACKIO_DIR"] = str(self.folder)
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import TRACKIO_DIR

        if self.folder != Path(TRACKIO_DIR).absolute():
            raise UserError(f"Trackio writes into {TRACKIO_DIR} until this process ends.")
        return SQLiteStorage

    def begin(self) -> None:
        """Make the store; the run is there with its first points."""
        self.store.init_db(self.project)
        self.shown: set[tuple[str, int]] = set()

    def held(self, rows: Sequence[Row]) -> Counter[str]:
        """Ask the store for all points; where they are others, the run is emptied."""
        logs = self.store.get_logs(self.project, self.label.name, run_id=self.id)
        held: list[Row] = []
        for each in logs:
            cells = {name: value for name, value in each.items() if not RESERVED.fullmatch(name)}
            pictures = {name for name, value in cells.items() if isinstance(value, dict)}
            self.shown |= {(name, each["step"]) for name in pictures}
            points = {name: float(cells[name]) for name in cells.keys() - pictures}
            held.append((each["step"], points))
        renamed = [(step, {plain(k): v for k, v in row.items()}) for step, row in rows]
        if not is_beginning(held, renamed):
            self.store.delete_run(self.project, self.label.name, run_id=self.id)
            held, self.shown = [], set()
        counts = values_in(held)
        return Counter({k: counts[plain(k)] for _, row in rows for k in row})

    def send(self, rows: Sequence[Row]) -> None:
        """Add rows, all or none."""
        self._write([row for _, row in rows], [step for step, _ in rows])

    def _write(self, rows: list[Any], steps: list[int]) -> None:
        self.store.bulk_log(
            self.project,
            self.label.name,
            [{plain(name): value for name, value in row.items()} for row in rows],
            steps=steps,
            config=self.label.settings,
            run_id=self.id,
        )

    def show(self, name: str, step: int, png: bytes) -> None:
        """Put a picture beside the store, and name it there."""
        if (plain(name), step) in self.shown:
            return
        trackio: Any = import_module("trackio")
        folder = trackio.get_project_media_path(
            project=self.project, run=self.label.name, step=step
        )
        path = Path(folder) / f"{zlib.crc32(png):08x}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)
        place = str(path.relative_to(self.folder / "media"))
        self._write(
            [{name: {"_type": trackio.Image.TYPE, "file_path": place, "caption": None}}], [step]
        )
        self.shown.add((plain(name), step))

    def end(self, status: str) -> None:
        """Keep the best checkpoint, if that is asked for."""
        best = self.best()
        if self.logs_model and status == "success" and best is not None:
            trackio: Any = import_module("trackio")
            artifact = trackio.Artifact(f"model-{self.label.name}", type="model")
            artifact.add_file(str(best), name="model.ckpt")
            run = trackio.Run(None, self.project, None, self.label.name, self.id)
            run.log_artifact(artifact, aliases=["best"])

    @property
    def experiment(self) -> Any:
        """Takes every call and does nothing: modules send their pictures to all loggers."""
        return DummyLogger().experiment

    @property
    def version(self) -> str:
        """The run."""
        return self.label.name


def plain(name: str) -> str:
    """A name that Trackio does not keep for itself, changed as it changes it."""
    return f"__{name}" if RESERVED.fullmatch(name) or name.startswith("__") else name
