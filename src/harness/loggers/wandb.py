"""Weights & Biases, offline by default.

The service replaces what it has of a run by the offline folder that is synced last: several of one
run never become one there. So each start writes one folder anew, from the run's own logs, and
removes those before it.
"""

import io
import os
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from PIL import Image
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from harness.loggers.mirror import Mirror
from harness.loggers.rows import Row, values_in
from harness.places import shown

OPENING = threading.RLock()  # a module may ask for the run while the mirror opens it
STEP = "trainer/global_step"  # Lightning's axis of all curves
ROW = "trainer/row"  # of metrics.csv: the service tells a run that goes on which one it had last


class Wandb(Mirror, WandbLogger):
    """Lightning's logger, whose points come from ``metrics.csv``: see ``mirror``.

    Args:
        run_dir: the run's folder; ``wandb/`` in it takes what is offline.
        project: of W&B.
        offline: write files, which ``wandb sync`` sends; ``False`` sends at once.
        log_model: keep the best checkpoint as an artifact.
        settings: of ``wandb.Settings``.
        kwargs: of ``wandb.init``, such as ``entity`` or ``group``.
    """

    package = "wandb"

    def __init__(
        self,
        run_dir: str,
        project: str = "lightning",
        offline: bool = True,
        log_model: bool = False,
        settings: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.prepare(run_dir)
        if offline:  # else W&B tells its service of an offline run as well
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self.takes_back, self.logs_model = offline, log_model
        # The terminal and its progress bar stay Lightning's.
        self.settings = {"silent": True, "console": "off", **(settings or {})}
        self.project = project
        self.arguments = dict(project=project, dir=str(self.run_dir), **kwargs)
        if offline:
            self.looked_at = f"wandb sync {shown(self.run_dir)}/wandb/offline-run-*"
        self.arguments["mode"] = "offline" if offline else "online"
        self.is_open = self.goes_on = False
        WandbLogger.__init__(self)

    @property
    def experiment(self) -> Any:
        """W&B's run, for what a module sends itself."""
        with OPENING:
            if getattr(rank_zero_only, "rank", 0) == 0 and not self.is_open:
                self._open()
            return super().experiment

    def _open(self) -> None:
        import wandb

        if self.takes_back:
            for folder in self.run_dir.glob(f"wandb/offline-run-*-{self.id}"):
                shutil.rmtree(folder)
        label = self.label
        about = {"config": label.settings, "tags": label.tags, "notes": label.notes}
        arguments = {"name": label.name, "id": self.id, "resume": "allow", **about}
        # Lightning's own call has a setting that W&B warns of; the rest is as it is there.
        run = wandb.init(**arguments | self.arguments, settings=wandb.Settings(**self.settings))
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        WandbLogger.__init__(self, experiment=run)
        self.is_open = True

    def begin(self) -> None:
        """Open W&B's run, offline in a folder of its own."""
        run = self.experiment
        self.goes_on = bool(run.resumed)
        if self.goes_on:  # the service has those of the first start
            run.config.update(self.label.settings, allow_val_change=True)
            run.tags, run.notes = self.label.tags, self.label.notes

    def held(self, rows: Sequence[Row]) -> Counter[str]:
        """Nothing in a new folder; the service tells the row that it has."""
        last = self.experiment.summary.get(ROW) if self.goes_on else None
        self.num_sent = 0 if last is None else int(last) + 1
        return values_in(rows[: self.num_sent])

    def send(self, rows: Sequence[Row]) -> None:
        """Log each row; its step is ``trainer/global_step``, over which Lightning has all drawn."""
        for step, row in rows:
            self.experiment.log({**row, ROW: self.num_sent, STEP: step})
            self.num_sent += 1

    def show(self, name: str, step: int, png: bytes) -> None:
        """Log a picture; the service may have those of an earlier start."""
        import wandb

        if self.has_sent or not self.goes_on:
            image = wandb.Image(Image.open(io.BytesIO(png)))
            self.experiment.log({name: image, STEP: step})

    def end(self, status: str) -> None:
        """Finish the run, which keeps its id."""
        best = self.best()
        if self.logs_model and status == "success" and best is not None:
            import wandb

            artifact = wandb.Artifact(f"model-{self.id}", type="model")
            artifact.add_file(str(best), name="model.ckpt")
            self.experiment.log_artifact(artifact, aliases=["best"])
        self.experiment.finish(exit_code=0 if status == "success" else 1)
        self.is_open = False

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Send what is no number, as ``log_image`` and ``log_table`` have it; see ``mirror``."""
        rest = {name: value for name, value in metrics.items() if not is_number(value)}
        if rest:
            super(Mirror, self).log_metrics(rest, step)


def is_number(value: Any) -> bool:
    """Whether a value has a cell in the table."""
    return isinstance(value, (int, float)) or hasattr(value, "item")
