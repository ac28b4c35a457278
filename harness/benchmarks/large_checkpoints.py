"""Measure the private memory of a process that reads a large checkpoint.

    python benchmarks/large_checkpoints.py [--repeats 3] [--gigabytes 2] [--other <checkout>]

A third of the checkpoint is weights, the rest is AdamW's state. Pages of mapped files do not count,
because processes share them and the system can drop them. `--other` is a checkout of another commit
of this repository; it and this checkout take turns.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import contest

LIBRARY = Path(__file__).resolve().parents[1]
TRAIN = ("model=mlp", "data.num_train=64", "data.batch_size=32", "data.num_val=32", "test=false")
TRAIN += ("trainer.max_epochs=1", "parity_check=false", "name=run", "data.num_test=32")
CPU = ("trainer.accelerator=cpu", "trainer.enable_progress_bar=false")
TWO = ("strategy=ddp", "trainer.devices=2")
USES = {
    "evaluate.py": ("evaluate.py", "checkpoint={run}/checkpoints/last.ckpt"),
    "evaluate.py, ddp(2)": ("evaluate.py", "checkpoint={run}/checkpoints/last.ckpt", *TWO),
    "predict.py": ("predict.py", "checkpoint={run}/checkpoints/last.ckpt"),
    "init=<run>": ("train.py", *TRAIN, "init={run}", "{hidden}", "dry"),
    "resume=<run>": ("train.py", "resume={copy}", "trainer.max_epochs=2"),
    "resume=<run>, ddp(2)": ("train.py", "resume={copy}", "trainer.max_epochs=2", *TWO),
}
DRY = ("trainer.limit_train_batches=0", "trainer.limit_val_batches=0", "checkpoint=null")
DRY += ("model/scheduler=constant",)


def anonymous(group: int) -> list[int]:
    """Return the private bytes of each process of a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                status = (folder / "status").read_text()
                found += [1024 * int(kb) for kb in re.findall(r"RssAnon:\s+(\d+)", status)]
        except OSError:  # it has ended
            continue
    return found


def peak(library: Path, words: list[str]) -> float:
    """Run a command of a checkout; return the largest private memory of a process in MiB."""
    project = library / "tests" / "project"
    sources = [library / "src", project / "src"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))}
    environment |= {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *words, *CPU],
            **{"cwd": project, "env": environment, "start_new_session": True},
            **{"stdout": said, "stderr": said},
        )
        most = 0
        while process.poll() is None:
            most = max([most, *anonymous(process.pid)])
            time.sleep(0.02)
        if process.returncode:
            said.seek(0)
            sys.exit(said.read())
    return most / 2**20


def measure(use: tuple[str, ...], library: Path, run: Path, hidden: str) -> float:
    """Return the peak of one use of a run, which is as before then."""
    with tempfile.TemporaryDirectory(dir=run.parent) as folder:
        copy = Path(folder, "copy")
        if "{copy}" in " ".join(use):
            shutil.copytree(run, copy, symlinks=True)
        words = [*filter("dry".__ne__, use), *(DRY if "dry" in use else ())]
        words = [word.format(run=run, copy=copy, hidden=hidden) for word in words]
        output = [] if "{copy}" in " ".join(use) else [f"output_dir={folder}"]
        return peak(library, [*words, *output])


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=3)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--other", type=Path)
    options = parser.parse_args()
    width = int((options.gigabytes * 1e9 / 12 / 8) ** 0.5)
    hidden = f"model.net.hidden={[width] * 9}".replace(" ", "")  # eight layers of weights
    libraries = {"this checkout": LIBRARY}
    if options.other is not None:
        libraries = {"the other checkout": options.other.resolve() / "harness"} | libraries
    with tempfile.TemporaryDirectory(dir=os.curdir) as folder:
        path = Path(folder).resolve()
        arguments = ["train.py", *TRAIN, hidden, f"output_dir={path}"]
        print(f"a training takes {peak(LIBRARY, arguments):,.0f} MiB", flush=True)
        (run,) = (path / "run").iterdir()
        size = (run / "checkpoints" / "last.ckpt").stat().st_size
        for name, use in USES.items():
            turns: dict[str, Callable[[], float]] = {
                f"{name}: {whose}": partial(measure, use, library, run, hidden)
                for whose, library in libraries.items()
            }
            figures = contest.take_turns(turns, options.repeats)
            contest.show(f"checkpoint of {size / 1e9:.2f} GB", "MiB", figures, decimals=0)


if __name__ == "__main__":
    main()
