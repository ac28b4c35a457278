"""Measure the seconds and the memory that malicious files cost, beside a harmless file.

    python benchmarks/strangers_files.py

A new process reads each file with the function that commands use. Printed are the CPU seconds, and
the MiB beyond those of a harmless file and beyond the file's own size. At most 2 s and 256 MiB are
allowed. Files that are refused are as large as a file may be before the library checks it. Files
that are not refused are at the limits of docs/strangers_files.md.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import harness
from harness.files import write_yaml

MOST_SECONDS, MOST_MIB = 2.0, 256
PROGRAM = """
import sys, time
from pathlib import Path
from harness.command import config_files, run_folder
from harness.checkpoints import lookup
from harness.errors import UserError
from harness.runs import reading, table
import harness.convert.checkpoint, harness.convert.tensors, polars
kind, path = sys.argv[1], Path(sys.argv[2])
started, said = time.process_time(), "read"
try:
    if kind == "run":
        run = reading.read(path.parent)
        frame = reading.as_frame([run] * 50)
        table.overview(frame)
        said = run["status"]
    elif kind == "config":
        run_folder.load_config(path.parent)
    elif kind == "checkpoint":
        said = lookup.damage(path) or said
    else:
        config_files.check_sizes([path.parent])
        config_files.hydra_compose("file", [], path.parent)
except UserError as error:
    said = str(error)
except Exception as error:
    said = repr(error)
seconds = time.process_time() - started
status = Path("/proc/self/status").read_text()  # of this program; rusage has its parent's as well
peak = int(status.partition("VmHWM:")[2].split()[0]) // 1024
print(seconds, peak, " ".join(said.split())[-60:], sep="\\t")
"""
LEVELS = "\n".join(f"  - &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 6))
ALIASES = f"notes: &a0 [{','.join('x' * 9)}]\ntags:\n{LEVELS}\n"
KEYS = ",".join(f"k{i}: 0" for i in range(2400))
COLLIDING = ",".join(f"{i * (2**61 - 1)}: 0" for i in range(2400))
YAML = {
    "a plain file": "notes: a\n",
    "aliases, 9^5": ALIASES,
    "4,800 values": f"mine: {{{KEYS}}}\n",
    "4,800 values, keys that collide": f"mine: {{{COLLIDING}}}\n",
    "a text of 256 KB": f"notes: {'x' * 260_000}\n",
    "text, 2 MB by aliases": f"notes: &a {'x' * 200_000}\ntags: [{','.join(['*a'] * 9)}]\n",
    "260,000 values": f"tags: [{'a,' * 130_000}]\n",
    "260,000 levels": f"tags: {'[' * 260_000}\n",
    "a number of 240 KB": f"notes: {'59:' * 80_000}59\n",
}
WIDE = ",".join(f"m{i}" for i in range(500_000))
RUN = {
    "results.json": {
        "a plain file": "{}",
        "8 MB of lists": f"[{'[],' * 2_600_000}[]]",
        "400,000 values": '{"a": [' + "[]," * 199_000 + "1]}",
        "5,000 names": "{" + ",".join(f'"m{i}": 0.5' for i in range(5000)) + "}",
        "a number of 8 MB": f'{{"a": {"9" * 8_000_000}}}',
        "8 million levels": "[" * 8_000_000,
    },
    "metrics.csv": {
        "a plain file": "step,val/loss\n1,2\n",
        "500,000 columns": f"step,{WIDE}\n" + "1,2\n" * 100,
        "8 million cells": "step,val/loss\n" + "1,0.123456\n" * 4_000_000,
        "8 million cells, 4,000 columns": "step,"
        + ",".join(f"m{i}" for i in range(3999))
        + "\n"
        + "1\n" * 2_000,
        "128 MB of line breaks": "step\n" + "\n" * 130_000_000,
    },
}


def pickled(levels: int) -> bytes:
    """Return a pickle of a list of two equal lists of two equal lists, and so on."""
    inner = b"]q\x00"
    for i in range(levels):
        inner = b"](" + inner + b"h" + bytes([i]) + b"eq" + bytes([i + 1])
    return b"\x80\x02" + inner + b"."


def checkpoints(folder: Path) -> dict[str, Path]:
    """Write checkpoints, each a zip of torch.save's with another pickle."""
    zeros = b"\x80\x02]" + b"".join([b"X\x00\x00\x10\x00", b" " * 2**20, b"0"] * 256) + b"."
    kinds = {
        "a plain file": (b"\x80\x02}.", zipfile.ZIP_STORED),
        "256 MB compressed to 0.3": (zeros, zipfile.ZIP_DEFLATED),
        "lists of lists, 2^200": (pickled(200), zipfile.ZIP_STORED),
        "bytearray(2^31 - 1)": (
            pickle.dumps(bytearray, 2)[:-1] + b"J\xff\xff\xff\x7f\x85R.",
            zipfile.ZIP_STORED,
        ),
        "a history of 1,000,000 numbers": (pickle.dumps([*range(10**6)], 2), zipfile.ZIP_STORED),
    }
    paths = {}
    for number, (name, (content, kind)) in enumerate(kinds.items()):
        paths[name] = folder / f"{number}.ckpt"
        with zipfile.ZipFile(paths[name], "w", kind) as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", b"3\n")
    paths["400,000 entries"] = folder / "entries.ckpt"
    with zipfile.ZipFile(paths["400,000 entries"], "w") as archive:
        for number in range(400_000):
            archive.writestr(f"archive/{number}", b"")
    return paths


def measured(kind: str, path: Path) -> tuple[float, float, str]:
    """Return the seconds, the peak in MiB, and the printed message."""
    package = str(Path(harness.__path__[0]).parent)
    environment = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, kind, str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    seconds, peak, message = result.stdout.rstrip("\n").split("\t")
    return float(seconds), float(peak), message


def show(kind: str, files: dict[str, Path]) -> list[str]:
    """Measure files of a kind, the first of which is harmless; return those beyond the limits."""
    print(f"\n{kind:42} seconds  MiB more", flush=True)
    base, beyond = 0.0, []
    for name, path in files.items():
        seconds, peak, message = measured(kind.partition(":")[0], path)
        base = base or peak
        more = max(0.0, peak - base - path.stat().st_size / 2**20)
        print(f"  {name:40} {seconds:7.2f} {more:9.0f}  {message}", flush=True)
        beyond += [f"{kind}: {name}"] * (seconds > MOST_SECONDS or more > MOST_MIB)
    return beyond


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    beyond: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        config = "data: null\nmodel: null\nseed: 1\ntrainer: null\nobjective: val/loss\n"
        for kind in ("experiment", "config", "run"):
            files = {}
            for number, (name, text) in enumerate(YAML.items()):
                folder = Path(root, f"{kind}_{number}")
                folder.mkdir()
                path = folder / ("file.yaml" if kind == "experiment" else "config.yaml")
                path.write_text(text)
                if kind != "experiment":
                    write_yaml(path, config + text)
                files[name] = path
            beyond += show(f"{kind}: a YAML file", files)
        for file, texts in RUN.items():
            files = {}
            for number, (name, text) in enumerate(texts.items()):
                folder = Path(root, f"{file}_{number}")
                folder.mkdir()
                write_yaml(folder / "config.yaml", config)
                (folder / file).write_text(text)
                files[name] = folder / file
            beyond += show(f"run: {file}", files)
        beyond += show("checkpoint: a zip", checkpoints(Path(root)))
    print(f"\nbeyond {MOST_SECONDS} s or {MOST_MIB} MiB: {', '.join(beyond) or 'none'}")


if __name__ == "__main__":
    main()
