"""Parse files that may be a stranger's: within limits on bytes, values and depth.

In: the bytes of a YAML, JSON or CSV file of a run's folder, or of an experiment. Out: plain values,
or a ``ValueError``. A few bytes may stand for gigabytes: aliases that repeat aliases, tables with
half a million columns. docs/strangers_files.md lists the limits, and benchmarks/strangers_files.py
measures what the worst files cost. Imports no torch.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from harness.files import MAX_JSON, MAX_YAML, read_bytes

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may come without libyaml
MAX_TABLE = 2**27  # bytes of a metrics.csv
MAX_CELLS = 2**23  # of a table, counting those that short rows lack
MAX_VALUES = 5_000  # of a YAML file, aliases filled in
MAX_JSON_VALUES = 400_000
MAX_TEXT = 2**21  # bytes of all values of a YAML file, aliases filled in
MAX_DEPTH = 100
# A YAML file that is small, and has neither anchors nor a line that opens many levels, is harmless.
SMALL = MAX_VALUES * 2
DEEP = re.compile(rb"&|^[ \t?-]{100}", re.MULTILINE)
LONG_NUMBER = re.compile(rb"(?<![\w.])[-+]?\d[\d_:.a-fxA-FX]{400}")  # 60:60:... takes hours


def read_yaml(path: Path) -> Any:
    """Read a YAML file; raises an OSError or a ValueError."""
    return parse_yaml(read_bytes(path, MAX_YAML))


def parse_yaml(data: bytes) -> Any:
    """Parse YAML of at most ``MAX_YAML`` bytes."""
    check_yaml(data)
    try:
        return yaml.load(data, LOADER)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def check_yaml(data: bytes) -> None:
    """Raise a ValueError if a YAML text stands for more than a settings file holds.

    What is no YAML passes: whoever parses it says so, with the line.
    """
    if LONG_NUMBER.search(data):
        raise ValueError("it holds a number of more than 400 digits")
    if len(data) > MAX_YAML:
        raise ValueError(f"it has more than {MAX_YAML:,} bytes")
    num_brackets = data.count(b"[") + data.count(b"{")
    if len(data) < SMALL and num_brackets < MAX_DEPTH and not DEEP.search(data):
        return
    sizes: dict[str | None, tuple[int, int]] = {}  # of anchors: values and bytes inside of them
    inside: list[tuple[str | None, int, int]] = []  # anchors, and what was before them
    values = num_bytes = 0  # aliases filled in
    try:
        for event in yaml.parse(data, LOADER):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise ValueError(f"*{event.anchor} stands for a value that it is in")
                more, more_bytes = sizes[event.anchor]
                values, num_bytes = values + more, num_bytes + more_bytes
            elif isinstance(event, yaml.ScalarEvent):
                values, num_bytes = values + 1, num_bytes + len(event.value)
                sizes[event.anchor] = 1, len(event.value)
            elif isinstance(event, yaml.CollectionStartEvent):
                inside.append((event.anchor, values, num_bytes))
                values += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, values_before, bytes_before = inside.pop()
                sizes[anchor] = values - values_before, num_bytes - bytes_before
            if len(inside) > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
            if values > MAX_VALUES or num_bytes > MAX_TEXT:
                raise ValueError(f"it has more than {MAX_VALUES:,} values, aliases filled in")
    except yaml.YAMLError:
        return


def read_json(path: Path) -> Any:
    """Read a JSON file; raises an OSError or a ValueError."""
    return parse_json(read_bytes(path, MAX_JSON))


def parse_json(data: bytes) -> Any:
    """Parse JSON of at most ``MAX_JSON`` bytes; a whole number beyond 64 bits becomes a float."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"it has more than {MAX_JSON_VALUES:,} values")
    try:
        found = json.loads(data, parse_int=lambda text: (int if len(text) < 19 else float)(text))
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from error
    level = [found] if isinstance(found, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for node in inner for child in node if isinstance(child, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    return found


def table_bytes(path: Path) -> bytes:
    """Read a CSV file if its cells are not too many; raises an OSError or a ValueError."""
    data = read_bytes(path, MAX_TABLE)
    header, num_commas = data.partition(b"\n")[0], data.count(b",")
    num_rows = 1 + max(data.count(b"\n"), data.count(b"\r"))
    # Short rows are filled up, and a quoted line break would hide columns.
    num_cells = max(num_commas, num_rows * (1 + header.count(b",")))
    if num_cells > MAX_CELLS or header.count(b'"') % 2:
        raise ValueError(f"{path.name} has {num_cells:,} cells, and at most {MAX_CELLS:,} are read")
    return data
