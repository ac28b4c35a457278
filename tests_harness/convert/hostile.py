"""Convert files that ask for more than they have bytes, and measure what each of them costs.

    python -m tests_harness.convert.hostile --num 20000 --seed 0

Each file is converted in a process of its own, under an audit hook and limits of CPU and memory.
Prints the slowest, the largest in memory, and whatever ended in neither a result nor a sentence.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from . import hostile_files, random_pickles

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


def num_bytes(path: Path) -> int:
    """Bytes of a file or a folder; where the disk holds nothing of them, one in 300 counts."""
    found = [p.stat() for p in (path.iterdir() if path.is_dir() else [path])]
    held = sum(min(p.st_blocks * 512, p.st_size) for p in found)
    return held + (sum(p.st_size for p in found) - held) // 300


def too_much(cost: Cost, size: int) -> bool:
    """Whether a file of so many bytes took more than 2 s and 128 MiB for each MB, or the least."""
    return cost.cpu_seconds > max(1, 2e-6 * size) or cost.mib > max(64, 128e-6 * size)


def make(folder: Path, rng: random.Random) -> tuple[str, Path]:
    """Write a random hostile file, and return its kind and its path."""
    size = int(10 ** rng.uniform(2, 5.3))
    if rng.random() < 0.4:
        return "random", random_pickles.make(folder, size // 4, rng)
    name = rng.choice(
        [name for name in hostile_files.FILES if "sparse_" not in name or rng.random() < 0.1]
    )
    return name, hostile_files.FILES[name](folder, size, rng)


def main() -> None:
    """Convert random hostile files and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num", type=int, default=20_000, help="files")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    status = sweep(options.num, options.seed)
    sys.exit(status)


def sweep(num: int, seed: int) -> int:
    """Return 1 if any file took too much, executed something or ended without a sentence."""
    ends: Counter[str] = Counter()
    slowest: list[Any] = []
    largest: list[Any] = []
    faults: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        converter = Converter(top)
        num_done = 0
        with suppress(KeyboardInterrupt):  # Ctrl-C prints what was found until then
            for i in range(num):
                rng = random.Random(f"{seed} {i}")
                folder = top / str(i)
                folder.mkdir()
                kind, path = make(folder, rng)
                size = num_bytes(path)
                cost = converter.convert(path, rng.choice([".pt", ".safetensors"]))
                ends[cost.result if cost.result == "converted" else "refused"] += 1
                costs = f"{cost.cpu_seconds:.2f} s, {cost.mib:.0f} MiB, {size:,} bytes"
                line = f"{costs}, file {i} ({kind})"
                slowest = sorted([*slowest, (cost.cpu_seconds, line)])[-5:]
                largest = sorted([*largest, (cost.mib, line)])[-5:]
                if too_much(cost, size) or cost.forbidden or cost.result.startswith("TRACEBACK"):
                    faults.append(f"{line}: {cost.result[:200]} {cost.forbidden[:2]}")
                    print("FAULT", faults[-1], flush=True)
                shutil.rmtree(folder)
                num_done += 1
        converter.close()
    print(f"{num_done} files, seed {seed}: {dict(ends)}, {len(faults)} faults")
    print("slowest", *(line for _, line in slowest[::-1]), sep="\n  ")
    print("largest", *(line for _, line in largest[::-1]), sep="\n  ")
    return int(bool(faults))


if __name__ == "__main__":
    main()
