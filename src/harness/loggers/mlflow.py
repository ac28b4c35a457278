"""MLflow, in an SQLite file beside the runs by default."""

import fcntl
import io
import logging
import os
import re
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from PIL import Image
from pytorch_lightning.loggers import MLFlowLogger

from harness.files import replacing
from harness.loggers.mirror import Mirror, place_of
from harness.loggers.rows import Row, is_beginning, values_in
from harness.names import flat
from harness.places import shown

MOST_METRICS, MOST_PARAMS, MOST_CHARACTERS = 1000, 100, 6000  # of a batch, and of a value
STATUSES = {"success": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
KIND = {"mlflow.experimentKind": "custom_model_development"}  # its page begins with curves
FILE = "mlflow.db"
OF_RUN = "harness.run"  # the tag with a run's id: MLflow gives runs ids of its own


class MLflow(Mirror, MLFlowLogger):
    """Lightning's logger, whose points come from ``metrics.csv``: see ``mirror``.

    Args:
        run_dir: the run's folder.
        folder: for ``mlflow.db``, and ``mlflow_artifacts/`` beside it.
        experiment_name: of MLflow.
        tracking_uri: of a server or a database; ``None`` is the file in ``folder``.
        log_model: keep the best checkpoint as an artifact.
    """

    package = "mlflow"

    def __init__(
        self,
        run_dir: str,
        folder: str,
        experiment_name: str = "lightning",
        tracking_uri: str | None = None,
        log_model: bool = False,
    ) -> None:
        self.prepare(run_dir)
        self.folder, self.logs_model = place_of(self.run_dir, folder, FILE), log_model
        self.takes_back = tracking_uri is None
        self.file = self.folder / FILE
        self.uri = tracking_uri or f"sqlite:///{self.file}"
        if self.takes_back:
            self.looked_at = f"mlflow ui --backend-store-uri sqlite:///{shown(self.file)}"
        self.project, self.run_name, self.clock = experiment_name, "", 0

    def begin(self) -> None:
        """Find the run by its tag, or create it with the tag: no kill comes between the two."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for name in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they tell of each new table
        with self._alone():
            client = MlflowClient(self.uri)
            found = client.get_experiment_by_name(self.project)
            place = (self.folder / "mlflow_artifacts").as_uri() if self.takes_back else None
            experiment = (
                found.experiment_id
                if found
                else client.create_experiment(self.project, artifact_location=place, tags=KIND)
            )
            runs = client.search_runs([experiment], f"tags.`{OF_RUN}` = '{self.id}'")
            # Not by Lightning, of which another thread may ask for a run at the same time.
            run = (
                runs[0]
                if runs
                else client.create_run(
                    experiment, tags={OF_RUN: self.id}, run_name=self.label.name or None
                )
            )
            run_id: Any = run.info.run_id
            MLFlowLogger.__init__(
                self,
                experiment_name=self.project,
                run_name=self.label.name,
                tracking_uri=self.uri,
                run_id=run_id,
            )
        tags = {"mlflow.note.content": self.label.notes, **dict.fromkeys(self.label.tags, "true")}
        for name, value in tags.items():
            client.set_tag(run_id, name, value)
        client.update_run(run_id, status="RUNNING")
        known = client.get_run(run_id).data.params  # which MLflow never changes
        params = [
            Param(plain(key), str(value)[:MOST_CHARACTERS])
            for key, value in flat(self.label.settings).items()
            if plain(key) not in known
        ]
        for first in range(0, len(params), MOST_PARAMS):
            client.log_batch(run_id, params=params[first : first + MOST_PARAMS])
        client.log_dict(run_id, self.label.settings, "settings.yaml")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time makes the file, the experiment and the run."""
        if not self.takes_back:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".mlflow.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.file.exists():
                self._make_file()
            yield

    def _make_file(self) -> None:
        """Make the file elsewhere: MLflow refuses one that a kill has left with some tables."""
        from mlflow import MlflowClient

        for old in self.folder.glob(".mlflow.db.*"):
            old.unlink()
        new = self.folder / f".mlflow.db.{os.urandom(4).hex()}"
        MlflowClient(f"sqlite:///{new}")
        with replacing(self.file) as file:
            file.write(new.read_bytes())
        new.unlink()

    def held(self, rows: Sequence[Row]) -> Counter[str]:
        """Ask MLflow for all points; a file in which they are others is emptied of this run's."""
        points = [
            (point.timestamp, point.step, name, point.value)
            for name in self.experiment.get_run(self.run_id).data.metrics
            for point in self.experiment.get_metric_history(self.run_id, name)
        ]
        points.sort(key=lambda point: point[:3])
        self.clock = points[-1][0] if points else 0
        held = [(step, {name: value}) for _, step, name, value in points]
        plain_rows = [(step, {plain(k): v for k, v in row.items()}) for step, row in rows]
        if self.takes_back and not is_beginning(held, plain_rows):
            # No call of MLflow's takes points back.
            with closing(sqlite3.connect(self.file, timeout=60)) as file, file:
                for table in ("metrics", "latest_metrics"):
                    file.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (self.run_id,))
            artifacts = self.folder / "mlflow_artifacts" / str(self.run_id) / "artifacts"
            shutil.rmtree(artifacts / "pictures", ignore_errors=True)
            held = []
        counts = values_in(held)
        return Counter({k: counts[plain(k)] for _, row in rows for k in row})

    def send(self, rows: Sequence[Row]) -> None:
        """Log whole rows, as many as a batch may have."""
        from mlflow.entities import Metric

        batch: list[Any] = []
        for step, row in rows:
            # MLflow drops a point that is there at the same time, and tells the order by it.
            self.clock = max(self.clock + 1, time.time_ns() // 1_000_000)
            if len(batch) + len(row) > MOST_METRICS:
                self.experiment.log_batch(self.run_id, metrics=batch)
                batch = []
            batch += [Metric(plain(name), value, self.clock, step) for name, value in row.items()]
        self.experiment.log_batch(self.run_id, metrics=batch)

    def show(self, name: str, step: int, png: bytes) -> None:
        """Write an artifact, over the same one of an earlier start."""
        image = Image.open(io.BytesIO(png))
        self.experiment.log_image(self.run_id, image, f"pictures/{plain(name)}_{step}.png")

    def end(self, status: str) -> None:
        """Say how the run has ended."""
        best = self.best()
        if self.logs_model and status == "success" and best is not None:
            self.experiment.log_artifact(self.run_id, str(best), "model")
        self.experiment.set_terminated(self.run_id, STATUSES[status])


def plain(name: str) -> str:
    """A name without the signs that MLflow refuses."""
    return re.sub(r"[^\w/. -]", "_", name)
