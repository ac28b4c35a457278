"""Make a run's logs what they were when a checkpoint was written.

A checkpoint records how long each log was. What was logged later is cut off, because it will be
logged again: the file of TensorBoard by its bytes, ``metrics.csv`` by its rows, whatever a module
counts as steps.
"""

import logging
import os
from pathlib import Path
from typing import Any

from harness.files import fsync
from harness.loggers import metrics_table

log = logging.getLogger(__name__)

PREFIX = "events.out.tfevents."  # of the names of TensorBoard's files
EMPTY: dict[str, Any] = {"rows": 0, "events": {}}


class Logs:
    """A run's ``metrics.csv`` and files of TensorBoard; make it before the loggers open theirs.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.table, self.folder = run_dir / "metrics.csv", run_dir / "tensorboard"
        self.earlier = self._files()  # this process has opened none

    def record(self) -> dict[str, Any]:
        """Sync what the loggers have written; return the table's rows and the files' bytes."""
        files = self._files()
        for path in [*files.values(), *[self.table] * self.table.exists()]:
            fsync(path)
        sizes = {name: path.stat().st_size for name, path in files.items()}
        num_lines = len(self.table.read_bytes().splitlines()) if self.table.exists() else 0
        return {"rows": max(0, num_lines - 1), "events": sizes}

    def rewind(self, record: dict[str, Any] = EMPTY) -> None:
        """Cut off what was logged after a record was made; warn of what is missing before it."""
        self._cut_table(record["rows"])
        for name in record["events"].keys() - self.earlier.keys():
            log.warning("%s is not there, nor are the curves in it.", self.folder / name)
        for name, path in self.earlier.items():
            if not (size := record["events"].get(name, 0)):
                path.unlink()
            elif size <= path.stat().st_size:
                os.truncate(path, size)
            else:
                log.warning("%s has lost %d bytes.", path, size - path.stat().st_size)

    def _cut_table(self, num_rows: int) -> None:
        """Leave the first rows, and the columns that have a value in one of them."""
        if num_rows == 0:
            self.table.unlink(missing_ok=True)
            return
        num_left = metrics_table.cut(self.table, num_rows)
        if num_left < num_rows:
            log.warning("%s has lost rows: %d of %d are left.", self.table, num_left, num_rows)

    def _files(self) -> dict[str, Path]:
        """Return TensorBoard's files, by path below its folder; add_scalars makes subfolders."""
        paths = sorted(self.folder.rglob(f"{PREFIX}*"))
        return {str(path.relative_to(self.folder)): path for path in paths}
