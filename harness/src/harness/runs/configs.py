"""Parse the configs of many runs. Runs of a sweep have most lines in common, which are parsed once.

In: the bytes of a YAML file. Out: its value, as ``untrusted.parse_yaml`` returns it.
"""

import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

from harness import untrusted

ENTRY = re.compile(rb"^(?=\w)", re.MULTILINE)  # where an entry of the outermost mapping begins
NESTED = re.compile(rb"(\w+:\n)((?:  .*\n)+)")  # an entry whose value is indented by two spaces
# With these, or other ends of a line, the value of an entry may depend on other lines.
NOT_ALONE = (b"&", b"<<", b"\n...", b"\n  ...", b"\n  ---", b"\r")
INDENT = re.compile(rb"^  ", re.MULTILINE)


def parse(data: bytes) -> Any:
    """Return the value of a YAML file; raise a ValueError as ``untrusted.parse_yaml`` does."""
    untrusted.check_yaml(data)
    if data.isascii() and not any(map(data.__contains__, NOT_ALONE)):
        with suppress(ValueError, AttributeError):  # an entry is no mapping by itself
            return _parse_entries(data)
    return untrusted.parse_yaml(data)


def _parse_entries(data: bytes) -> dict[Any, Any]:
    """Return a mapping whose entries are parsed one by one."""
    head, *entries = ENTRY.split(data)
    if not entries or (head and untrusted.parse_yaml(head) is not None):
        raise ValueError("it is not a mapping")
    return {key: value for entry in entries for key, value in _parse_entry(entry).items()}


@lru_cache(maxsize=1024)
def _parse_entry(data: bytes) -> dict[Any, Any]:
    """Return one entry of a mapping. Several runs share it, so it must not be changed."""
    if not (match := NESTED.fullmatch(data)):
        return untrusted.parse_yaml(data)  # type: ignore[no-any-return]
    (key,) = _parse_entry(match[1])
    inner = INDENT.sub(b"", match[2])
    return {key: _parse_entries(inner) if ENTRY.match(inner) else untrusted.parse_yaml(inner)}
