"""Makes a run's logs what they were when a checkpoint was written.

The checkpoint tells what they were: of each of TensorBoard's files the length and a checksum, of
each row of ``metrics.csv`` its step and a checksum. What was logged later goes, because it will be
logged again. What is damaged or missing comes back from the other log. No time of a clock decides.
"""

import logging
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger

from harness.files import sync, write_durably
from harness.loggers import metrics_table
from harness.loggers.event_files import (
    PREFIX,
    begins_as,
    count_values,
    read_events,
    read_on,
    unread,
)
from harness.loggers.metrics_table import MetricsTable, key_of, lines_of, row_of
from harness.loggers.mirror import Known, Mirror
from harness.loggers.rebuild import File, bring_back_events, bring_back_rows

log = logging.getLogger(__name__)


class Logs:
    """A run's ``metrics.csv`` and files of TensorBoard; make it before the loggers open theirs.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.table, self.folder = run_dir / "metrics.csv", run_dir / "tensorboard"
        self.earlier = self._files()  # this process has opened none
        self.states: list[dict[str, Any]] = []  # of all files, the oldest first
        self.contents = metrics_table.no_contents()
        self.mirrors: list[Mirror] = []

    def begin(self, loggers: Iterable[Logger]) -> None:
        """Share with the table's logger what it has written, and what was written before.

        The mirrors are told of what was there when the checkpoint was written.
        """
        self.mirrors = [logger for logger in loggers if isinstance(logger, Mirror)]
        self.telling_mirrors()()
        for logger in loggers:
            if isinstance(logger, MetricsTable):
                if not self.contents["rows"]:
                    self.contents = logger.contents
                logger.contents = self.contents

    def record(self) -> dict[str, Any]:
        """Put on the disk what is logged, and tell what it is; the loggers have written it."""
        known = {state["name"] for state in self.states}
        names = sorted(str(path.relative_to(self.folder)) for path in self._files())
        self.states += [unread(name) for name in names if name not in known]
        for state in self.states:
            if (path := self.folder / state["name"]).exists():
                read_on(state, path)
                sync(path)
        if self.table.exists():
            sync(self.table)
        # Of a file into which nothing was written yet nothing is known by which to find it.
        states = [state for state in self.states if state["length"]]
        return {"events": states, "table": self.contents}

    def telling_mirrors(self) -> Callable[[], None]:
        """What to call when there is a checkpoint of the logs as they are now."""
        lengths = {state["name"]: state["length"] for state in self.states}
        known = Known(len(self.contents["rows"]), lengths)

        def tell() -> None:
            for mirror in self.mirrors:
                mirror.commit(known)

        return tell

    def rewind(self, record: dict[str, Any] | None, step: int) -> None:
        """Make the logs what they were when a record was made.

        Args:
            record: of ``record``; without one, rows and events of ``step`` and later go.
            step: of the first values that will be logged again.
        """
        record = record or {"events": self._guess_events(step), "table": self._guess_table(step)}
        columns, keys = record["table"]["columns"], record["table"]["rows"]
        files = self._found(record["events"])
        for path in self.earlier - {file.path for file in files}:
            path.unlink()
        lines = lines_of(self.table)
        heads = [lines[0], columns] if lines[0] != columns else [columns]
        parts = [row_of(head, line) for head in heads for line in lines]
        whole = {key_of(row): row for row in parts}
        rows = [whole.get((step, checksum)) for step, checksum in keys]
        if None in rows or not all(file.is_whole for file in files):
            for file in files:
                file.read(step)
            bring_back_rows(self.table, record["table"], rows, parts, files)
            bring_back_events(rows, files)
        self._write_table(columns, [row for row in rows if row is not None])
        self._write_events(files)

    def _write_table(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        self.contents = {"columns": columns, "rows": [key_of(row) for row in rows]}
        text = metrics_table.text_of(columns, rows)
        if not columns:
            self.table.unlink(missing_ok=True)
        elif not self.table.exists() or self.table.read_bytes() != text:
            write_durably(self.table, text)

    def _write_events(self, files: list[File]) -> None:
        self.states = []
        for file in files:
            file.write()
            self.states.append(file.state if file.is_whole else unread(""))
        # TensorBoard reads files in the order of their names, which begin with the time, and drops
        # what it has read of later steps: where a clock was set back, the earlier get a number.
        mine = sorted(path.name for path in self._files() - {file.path for file in files})
        for folder in {file.path.parent for file in files}:
            ours = [file for file in files if file.path.parent == folder]
            names = [file.path.name for file in ours] + mine[:1]
            for number, file in enumerate(ours if names != sorted(names) else []):
                rest = file.path.name.removeprefix(PREFIX).partition(".")[2]
                path = file.path.with_name(f"{PREFIX}{number:010d}.{rest}")
                if not path.exists():
                    file.path = file.path.rename(path)
        for state, file in zip(self.states, files, strict=True):
            state["name"] = str(file.path.relative_to(self.folder))

    def _files(self) -> set[Path]:
        return set(self.folder.rglob(f"{PREFIX}*"))

    def _found(self, states: list[dict[str, Any]]) -> list[File]:
        """The files of which a checkpoint tells, by what they hold: a name may have changed."""
        found, left = [], set(self.earlier)
        for state in states:
            named = self.folder / state["name"]
            if not named.resolve().is_relative_to(self.folder.resolve()):
                continue  # no name that we have written
            paths = [*left & {named}, *sorted(left - {named})]
            same = next((path for path in paths if begins_as(path, state)), None)
            left.discard(same or named)
            found.append(File(state, same or named, is_whole=same is not None))
        return found

    def _guess_events(self, step: int) -> list[dict[str, Any]]:
        """What a checkpoint of an older version would have told of TensorBoard's files."""
        found = []
        for path in self.earlier:
            records = read_events(path)
            values = [record for record in records if record.event.HasField("summary")]
            later = next((record for record in values if record.event.step >= step), None)
            kept = [record for record in records if later is None or record.end <= later.start]
            if values and values[0] is later:
                continue  # all of it will be logged again
            starts = [record.start for record in kept] + ([later.start] if later else [])
            ends = [0, *(record.end for record in kept)]
            if num_gaps := sum(a != b for a, b in zip(ends, starts, strict=False)):
                log.warning(
                    "%s is damaged at %d places; its values there are lost.", path, num_gaps
                )
            first = values[0].event.step if values else step
            state = unread(str(path.relative_to(self.folder)))
            state["length"] = ends[-1]
            state["crc32"] = -1 if num_gaps else zlib.crc32(path.read_bytes()[: ends[-1]])
            count_values((record.event for record in kept), state["values"])
            found.append((first, path, state))
        return [state for *_, state in sorted(found, key=lambda each: each[:2])]

    def _guess_table(self, step: int) -> dict[str, Any]:
        """What a checkpoint of an older version would have told of the table."""
        columns, *lines = lines_of(self.table)[:-1] or [[]]  # the last was cut off, or is empty
        if columns and "step" not in columns:
            self.table.replace(self.table.with_name(f"{self.table.name}.damaged"))
            log.warning("%s had lost its first line, and was set aside as .damaged.", self.table)
            columns, lines = [], []
        rows = [row_of(columns, line) for line in lines if len(line) == len(columns)]
        rows = [row for row in rows if re.fullmatch("[0-9]+", row.get("step", ""))]
        if num_damaged := len(lines) - len(rows):
            log.warning("%d damaged rows were taken out of %s.", num_damaged, self.table)
        keys = [key_of(row) for row in rows if int(row["step"]) < step]
        return {"columns": columns, "rows": keys}
