"""A large table: how long until the first step, and what a batch costs.

    python benchmarks/tables.py
    python benchmarks/tables.py --num-rows 100000 --folder /tmp/tables

It writes a CSV of 50 columns, a target and 9 categories among them, encodes it once, and measures:
starts of train.py with a cold and with a warm cache, each in a new process, up to the first
training step, in seconds and in those that the processor has worked (a busy machine has more of the
former); and rows per second of the training loader against a bare numpy.take of the same
batches, in turns.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl

from harness.tables.table import Table

ROOT = Path(__file__).resolve().parents[1]
NUM_NUMBERS, NUM_CATEGORIES = 40, 9
STARTED = re.compile(r"^first step after ([\d.]+) s, ([\d.]+) s of work$", re.M)

CALLBACK = '''
import time
import pytorch_lightning as pl


class FirstStep(pl.Callback):
    """Say when the first step is done, from the start of the command on, and end."""

    def __init__(self, began: float) -> None:
        self.began = began

    def on_train_batch_end(self, trainer, *_):
        wall, work = time.time() - self.began, time.process_time()
        print(f"first step after {wall:.2f} s, {work:.2f} s of work", flush=True)
        trainer.should_stop = True
'''


def write_table(path: Path, num_rows: int) -> None:
    """Numbers with five digits, texts of thirty values, and a target."""
    rng = np.random.default_rng(0)
    values = np.array([f"value {i}" for i in range(30)])
    columns: dict[str, Any] = {
        f"number_{i}": rng.standard_normal(num_rows).round(5) for i in range(NUM_NUMBERS)
    }
    columns |= {
        f"category_{i}": values[rng.integers(len(values), size=num_rows)]
        for i in range(NUM_CATEGORIES)
    }
    pl.DataFrame(columns | {"price": rng.standard_normal(num_rows)}).write_csv(path)


def first_step(table: Path, folder: Path, batch_size: int) -> tuple[float, float]:
    """Seconds from the command to its first training step, and those of the processor."""
    began = time.time()
    (folder / "first_step.py").write_text(CALLBACK)
    command = [
        *(sys.executable, ROOT / "train.py", "experiment=table", f"data.file={table}"),
        *("data.target=price", f"data.cache_dir={folder}/cache", f"data.batch_size={batch_size}"),
        *("trainer.max_steps=1", "test=false", "trainer.limit_val_batches=0", "strategy=cpu"),
        *("trainer.enable_progress_bar=false", "checkpoint=null", f"output_dir={folder}/out"),
        *(
            "+callbacks.first._target_=first_step.FirstStep",
            f"+callbacks.first.began={began}",
        ),
    ]
    paths = [str(folder), str(ROOT / "src")]
    result = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ":".join(paths), "YAML_ALLOWED": "first_step"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = STARTED.search(result.stdout)
    if found is None:
        sys.exit(result.stdout + result.stderr)
    return float(found[1]), float(found[2])


def rows_per_second(
    table: Path, folder: Path, batch_size: int, repeats: int
) -> dict[str, list[float]]:
    """The loader's epochs and bare gathers of as many batches, in turns."""
    data = Table(
        file=str(table),
        target="price",
        batch_size=batch_size,
        cache_dir=f"{folder}/cache",
    )
    stand_in = SimpleNamespace(overfit_batches=0, accumulate_grad_batches=1, strategy=None)
    data.trainer = stand_in  # type: ignore[assignment]  # what the loader asks of one
    stand_in.strategy = SimpleNamespace(root_device=SimpleNamespace(type="cpu"))
    loader, inputs = data.train_dataloader(), data.arrays["inputs"]
    positions, targets = data.split_rows["train"], data.arrays["targets"]
    found: dict[str, list[float]] = {"loader": [], "numpy.take": []}
    order = np.random.default_rng(0).permutation(len(positions))
    for _ in range(repeats):
        began = time.perf_counter()
        num_rows = sum(len(batch[0]) for batch in loader)
        found["loader"].append(num_rows / (time.perf_counter() - began))
        began = time.perf_counter()
        for start in range(0, len(order), batch_size):
            rows = positions[order[start : start + batch_size]]
            inputs.take(rows, axis=0), targets.take(rows)
        found["numpy.take"].append(len(order) / (time.perf_counter() - began))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for the table and its cache; kept")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / f"table_{options.num_rows}.csv"
        if not table.exists():
            write_table(table, options.num_rows)
        megabytes = table.stat().st_size / 1e6
        print(f"{options.num_rows:,} rows, 50 columns, a CSV of {megabytes:,.0f} MB")
        starts = [first_step(table, folder, options.batch_size) for _ in range(1 + options.repeats)]
        speeds = rows_per_second(table, folder, options.batch_size, options.repeats)
    figures: dict[str, list[float]] = {}
    for i, name in enumerate(("", ", work")):
        figures[f"first start{name}"] = [starts[0][i]]
        figures[f"later starts{name}"] = [start[i] for start in starts[1:]]
    figures |= speeds
    for name, values in figures.items():
        unit = "s until the first step" if "start" in name else "rows/s"
        middle = float(np.median(values))
        print(f"{name:18} {middle:12,.1f} ({min(values):,.1f} - {max(values):,.1f}) {unit}")
    ratio = np.median(speeds["loader"]) / np.median(speeds["numpy.take"])
    print(f"the loader has {ratio:.2f} of the speed of numpy.take")
    if options.json:
        options.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
