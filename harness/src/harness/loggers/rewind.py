"""Makes a run's logs what they were when a checkpoint was written.

The checkpoint tells how long each log was. What was logged later goes, because it will be logged
again, whatever a module counts as steps.
"""

import logging
import os
from pathlib import Path
from typing import Any

from harness.files import sync
from harness.loggers import metrics_table
from harness.loggers.event_files import PREFIX

log = logging.getLogger(__name__)

EMPTY: dict[str, Any] = {"table": (0, ""), "events": {}}


class Logs:
    """A run's ``metrics.csv`` and files of TensorBoard; make it before the loggers open theirs.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.table, self.folder = run_dir / "metrics.csv", run_dir / "tensorboard"
        self.earlier = self._files()  # this process has opened none

    def record(self) -> dict[str, Any]:
        """Put on the disk what the loggers have written, and tell how much it is.

        Returns:
            ``table``, how many rows it has and the step of the last, and ``events``, the bytes of
            each of TensorBoard's files.
        """
        files = self._files()
        for path in [*files.values(), *[self.table] * self.table.exists()]:
            sync(path)
        sizes = {name: path.stat().st_size for name, path in files.items()}
        return {"table": metrics_table.end_of(self.table), "events": sizes}

    def rewind(self, record: dict[str, Any] = EMPTY) -> None:
        """Cut off what was logged after a record was made; say what is missing before it."""
        metrics_table.cut(self.table, *record["table"])
        for name, size in record["events"].items():
            found = self.earlier[name].stat().st_size if name in self.earlier else 0
            if found < size:
                log.warning("%s has lost %d bytes of its curves.", self.folder / name, size - found)
        for name, path in self.earlier.items():
            if not (size := record["events"].get(name, 0)):
                path.unlink()
            elif size < path.stat().st_size:
                os.truncate(path, size)

    def _files(self) -> dict[str, Path]:
        """TensorBoard's files, by their names in its folder; add_scalars makes some below it."""
        paths = sorted(self.folder.rglob(f"{PREFIX}*"))
        return {str(path.relative_to(self.folder)): path for path in paths}
