"""Cut a run's logs to their length at a checkpoint.

A checkpoint records the length of each log. A resumed run cuts off all later entries, because it
logs them again. TensorBoard's files are cut by bytes, and ``metrics.csv`` by rows. So the cut does
not depend on the module's own count of steps.
"""

import logging
import os
from pathlib import Path
from typing import Any

from harness.files import fsync
from harness.loggers import metrics_table

log = logging.getLogger(__name__)

PREFIX = "events.out.tfevents."  # begins the names of TensorBoard's files
EMPTY: dict[str, Any] = {"rows": 0, "events": {}}


class Logs:
    """A run's ``metrics.csv`` and TensorBoard files. Create it before the loggers open their files.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.table, self.folder = run_dir / "metrics.csv", run_dir / "tensorboard"
        self.earlier = self._files()  # files of earlier starts

    def record(self) -> dict[str, Any]:
        """Sync the logs to the disk; return the number of rows, and the bytes of each file."""
        files = self._files()
        for path in [*files.values(), *[self.table] * self.table.exists()]:
            fsync(path)
        sizes = {name: path.stat().st_size for name, path in files.items()}
        num_lines = len(self.table.read_bytes().splitlines()) if self.table.exists() else 0
        return {"rows": max(0, num_lines - 1), "events": sizes}

    def rewind(self, record: dict[str, Any] = EMPTY) -> None:
        """Cut off all entries after a record; warn of missing entries before the record."""
        self._cut_table(record["rows"])
        for name in record["events"].keys() - self.earlier.keys():
            log.warning(
                "The file %s is missing, so the curves up to the checkpoint are lost.",
                self.folder / name,
            )
        for name, path in self.earlier.items():
            if not (size := record["events"].get(name, 0)):
                path.unlink()
            elif size <= path.stat().st_size:
                os.truncate(path, size)
            else:
                log.warning(
                    "%s has lost %d bytes that were written before the checkpoint.",
                    path,
                    size - path.stat().st_size,
                )

    def _cut_table(self, num_rows: int) -> None:
        """Keep the first rows, and the columns that have a value in these rows."""
        if num_rows == 0:
            self.table.unlink(missing_ok=True)
            return
        num_left = metrics_table.cut(self.table, num_rows)
        if num_left < num_rows:
            log.warning("%s has lost rows: %d of %d are left.", self.table, num_left, num_rows)

    def _files(self) -> dict[str, Path]:
        """Return TensorBoard's files by path below its folder; ``add_scalars`` makes subfolders."""
        paths = sorted(self.folder.rglob(f"{PREFIX}*"))
        return {str(path.relative_to(self.folder)): path for path in paths}
