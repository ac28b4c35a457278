"""Convert files in processes of their own, and measure what each of them costs.

`python -m tests.convert.hostile` reads paths from its input and forks for each: the child converts
under an audit hook and limits of CPU and memory. `Converter` starts it and asks.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from harness.convert import CheckpointError, convert

# The effects that a conversion may have, and reading a file as well.
QUIET = {"os.listdir", "os.scandir", "glob.glob", "glob.glob/2", "pathlib.Path.glob", "os.remove"}
QUIET |= {"os.rename", "object.__getattr__", "os.truncate", "pathlib.Path.rglob", "sys._getframe"}
QUIET |= {"os.link", "os.mkdir", "array.__new__", "builtins.id"}

# An import opens files, so it comes before.
PRELOADED = [f"encodings.{name}" for name in ("ascii", "cp437", "latin_1", "unicode_escape")]
PRELOADED += ["encodings.raw_unicode_escape", "numpy.lib.stride_tricks"]


class Cost(NamedTuple):
    """The result of converting a file, with its time and memory."""

    result: str  # "converted", the sentence that refuses it, or "TRACEBACK ..."
    forbidden: list[list[str]]  # what ran, or was opened, that should not have been
    cpu_seconds: float
    mib: float  # at the peak, above that of a process that converts nothing


def serve(convert: Callable[[str, str], object]) -> None:
    """Answer each line of the input, a path and a suffix, with a line of JSON."""
    for line in sys.stdin:
        path, suffix = line.rstrip("\n").split("\t")
        answer, end = os.pipe()
        if not (pid := os.fork()):
            child(convert, path, suffix, end)
        os.close(end)
        with os.fdopen(answer, "rb") as file:
            text = file.read()
        _, status, usage = os.wait4(pid, 0)
        result, forbidden = json.loads(text) if text else (f"TRACEBACK killed {status}", [])
        cpu = usage.ru_utime + usage.ru_stime
        print(json.dumps([result, forbidden, cpu, usage.ru_maxrss / 1024]), flush=True)


def child(convert: Callable[[str, str], object], path: str, suffix: str, answer: int) -> None:
    folder, forbidden = os.path.dirname(path), list[list[str]]()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        is_own = event == "open" and str(args[0]).startswith(folder)
        if not (is_own or event in QUIET):
            forbidden.append([event, repr(args)[:100]])

    resource.setrlimit(resource.RLIMIT_CPU, (40, 40))
    sys.addaudithook(hook)
    try:
        convert(path, f"{folder}/out{suffix}")
        result = "converted"
    except (CheckpointError, OSError) as error:
        result = str(error)
    except BaseException as error:
        result = "TRACEBACK " + repr(error)
    os.write(answer, json.dumps([result[:2000], forbidden]).encode())
    os._exit(0)


class Converter:
    """A process that measures conversions, or with `unsafe` torch's own loading."""

    def __init__(self, folder: Path, *unsafe: str) -> None:
        command = [sys.executable, "-m", "tests.convert.hostile", *unsafe]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._idle = (0.0, 0.0)
        (folder / "nothing").write_bytes(b"")
        idle = self.convert(folder / "nothing")
        self._idle = idle.cpu_seconds, idle.mib

    def convert(self, path: Path, suffix: str = ".pt") -> Cost:
        """Convert a file to out.pt or out.safetensors beside it, and remove that."""
        assert self._process.stdin
        assert self._process.stdout
        print(path, suffix, sep="\t", file=self._process.stdin, flush=True)
        result, forbidden, cpu, mib = json.loads(self._process.stdout.readline())
        (path.parent / f"out{suffix}").unlink(missing_ok=True)
        return Cost(result, forbidden, cpu - self._idle[0], mib - self._idle[1])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    for name in PRELOADED:
        import_module(name)
    if sys.argv[1:]:
        import torch

        serve(lambda path, _: torch.load(path, weights_only=False))
    else:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        serve(convert)
