"""Parse files of strangers, within limits on bytes, values and depth. Imports no torch.

In: the bytes of a YAML, JSON or CSV file of a run's folder, or of an experiment. Out: its values,
or a ``ValueError``. Without limits, a few bytes may expand to gigabytes: aliases that repeat
aliases, tables with half a million columns. docs/strangers_files.md lists the limits, and
benchmarks/strangers_files.py measures the cost of the worst files.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from harness.files import MAX_JSON, MAX_YAML, read_bytes

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may come without libyaml
MAX_TABLE = 2**27  # bytes of a metrics.csv
MAX_CELLS = 2**23  # in a table, including the missing cells of short rows
MAX_VALUES = 5_000  # in a YAML file, with its aliases expanded
MAX_JSON_VALUES = 400_000
MAX_TEXT = 2**21  # bytes of all values in a YAML file, with its aliases expanded
MAX_DEPTH = 100
# A YAML file of fewer bytes is harmless if it has no anchor, and no line opens many levels.
SMALL = MAX_VALUES * 2
DEEP = re.compile(rb"^[ \t?-]{%d}" % MAX_DEPTH, re.MULTILINE)
MAX_DIGITS = 400
# 60:60:... takes hours
LONG_NUMBER = re.compile(rb"(?<![\w.])[-+]?\d[\d_:.a-fxA-FX]{%d}" % MAX_DIGITS)


def parse_yaml(data: bytes) -> Any:
    """Return the value of a YAML text of at most ``MAX_YAML`` bytes."""
    check_yaml(data)
    try:
        return yaml.load(data, LOADER)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def check_yaml(data: bytes) -> None:
    """Raise a ValueError if a YAML text expands to more than a config can hold.

    A text with a syntax error passes, because the parser's own error names the line.
    """
    longest = max(map(len, data.split(b"\n")))
    if longest > MAX_DIGITS and LONG_NUMBER.search(data):
        raise ValueError("it holds a number of more than 400 digits")
    if len(data) > MAX_YAML:
        raise ValueError(f"it has more than {MAX_YAML:,} bytes")
    num_brackets = data.count(b"[") + data.count(b"{")
    is_flat = longest < MAX_DEPTH or not DEEP.search(data)
    if len(data) < SMALL and num_brackets < MAX_DEPTH and b"&" not in data and is_flat:
        return
    sizes: dict[str | None, tuple[int, int]] = {}  # anchor -> (number of values, of bytes)
    # The open collections: anchor, and the values and bytes before them.
    inside: list[tuple[str | None, int, int]] = []
    values = num_bytes = 0  # with aliases expanded
    try:
        for event in yaml.parse(data, LOADER):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise ValueError(f"*{event.anchor} refers to a value that contains it")
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
                raise ValueError(f"it has more than {MAX_VALUES:,} values, with aliases expanded")
    except yaml.YAMLError:
        return


def read_json(path: Path) -> Any:
    """Return the value of a JSON file; raise an OSError or a ValueError if that fails."""
    return parse_json(read_bytes(path, MAX_JSON))


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text; an integer beyond 64 bits becomes a float."""
    num_brackets = data.count(b"[") + data.count(b"{")
    if num_brackets + data.count(b",") > MAX_JSON_VALUES:
        raise ValueError(f"it has more than {MAX_JSON_VALUES:,} values")
    try:
        found = json.loads(data, parse_int=lambda text: (int if len(text) < 19 else float)(text))
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from error
    if num_brackets <= MAX_DEPTH:
        return found
    level = [found] if isinstance(found, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for node in inner for child in node if isinstance(child, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    return found


def table_bytes(path: Path) -> bytes:
    """Return the bytes of a CSV file; raise an OSError, or a ValueError if it is too large."""
    data = read_bytes(path, MAX_TABLE)
    header, num_commas = data.partition(b"\n")[0], data.count(b",")
    num_rows = 1 + max(data.count(b"\n"), data.count(b"\r"))
    # Readers pad short rows. A quoted line break in the header would hide columns.
    num_cells = max(num_commas, num_rows * (1 + header.count(b",")))
    if num_cells > MAX_CELLS or header.count(b'"') % 2:
        raise ValueError(f"{path.name} has {num_cells:,} cells, and at most {MAX_CELLS:,} are read")
    return data
