"""Convert files in processes of their own, and measure what each of them costs.

Each conversion runs under an audit hook and limits of CPU and memory.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# Forks for each line of its input, converts the file that is named there and prints what that cost.
SERVER = """
import json, os, resource, shutil, sys
import numpy, numpy.lib.stride_tricks
import encodings.raw_unicode_escape, encodings.unicode_escape, encodings.latin_1, encodings.ascii
import encodings.cp437
from harness.convert import CheckpointError, convert
QUIET = {"os.listdir", "os.scandir", "glob.glob", "glob.glob/2", "pathlib.Path.glob", "os.remove",
         "os.rename", "object.__getattr__", "os.truncate", "pathlib.Path.rglob", "sys._getframe",
         "os.link", "os.mkdir", "array.__new__", "builtins.id"}
def child(path, suffix, answer):
    folder, forbidden, is_done = os.path.dirname(path), [], False
    def hook(event, args):
        is_own = event == "open" and str(args[0]).startswith(folder)
        if not (is_done or is_own or event in QUIET):
            forbidden.append([event, repr(args)[:100]])
    resource.setrlimit(resource.RLIMIT_CPU, (40, 40))
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    sys.addaudithook(hook)
    try:
        convert(path, folder + "/out" + suffix)
        result = "converted"
    except (CheckpointError, OSError) as error:
        result = str(error)
    except BaseException as error:
        result = "TRACEBACK " + repr(error)
    is_done = True
    os.write(answer, json.dumps([result[:2000], forbidden]).encode())
    os._exit(0)
for line in sys.stdin:
    path, suffix = line.rstrip("\\n").split("\\t")
    answer, end = os.pipe()
    pid = os.fork()
    if not pid:
        child(path, suffix, end)
    os.close(end)
    with os.fdopen(answer, "rb") as file:
        text = file.read()
    _, status, usage = os.wait4(pid, 0)
    result, forbidden = json.loads(text) if text else (f"TRACEBACK killed {status}", [])
    cpu = usage.ru_utime + usage.ru_stime
    print(json.dumps([result, forbidden, cpu, usage.ru_maxrss / 1024]), flush=True)
"""


class Cost(NamedTuple):
    """What converting a file led to, and what it took."""

    result: str  # "converted", the sentence that refuses it, or "TRACEBACK ..."
    forbidden: list[list[str]]  # what ran, or was opened, that should not have been
    cpu_seconds: float
    mib: float  # at the peak, above that of a process that converts nothing


class Converter:
    """A process that measures conversions."""

    def __init__(self, folder: Path, code: str = SERVER) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
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


def too_much(cost: Cost, size: int) -> bool:
    """Whether a file took more than the docs promise: of 10 MB, 5 s of computing and 300 MB."""
    return cost.cpu_seconds > 1 + 0.4e-6 * size or cost.mib > 64 + 24e-6 * size
