"""Format lists, paths, values and commands for messages."""

import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def join_first(items: Iterable[object], most: int = 5) -> str:
    """Return the first items, joined by commas, and the number of further items."""
    texts = [*map(str, items)]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def format_override(value: Any) -> str:
    """Return a value as a user types it in a command."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "null" if value is None else text[:60]


def quoted_override(key: str, value: str) -> str:
    """Return an override that sets a key to a text or a list of texts, as a user types it."""
    if value == "~" or value.startswith("~/"):  # the shell expands no ~ after the =
        return f'{key}="$HOME{value[1:]}"'
    is_list = value[:1] == "[" and value[-1:] == "]"
    texts = [text.strip() for text in value[1:-1].split(",")] if is_list else [value]
    quoted = ['"{}"'.format(text.replace('"', '\\"')) for text in texts]
    if is_list:
        safe = [re.fullmatch(r"[\w./+-]+", text) for text in texts]
        quoted = [a if is_safe else b for a, b, is_safe in zip(texts, quoted, safe, strict=True)]
        return shlex.quote(f"{key}=[{','.join(quoted)}]")
    return shlex.quote(f"{key}={quoted[0]}")


def display_path(file: str | Path) -> str:
    """Return a path relative to the working directory, or the absolute path if it is outside."""
    path = os.path.relpath(file)
    return os.path.abspath(file) if path.startswith("..") else path


def typed_command(module: str) -> str:
    """Return the command that the user typed: with a script, or with ``python -m module``."""
    is_script = not sys.argv[0].endswith("__main__.py")
    return f"python {sys.argv[0]}" if is_script else f"python -m {module}"
