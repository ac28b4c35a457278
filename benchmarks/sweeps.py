"""How well a sweep fills the machine: the time that jobs of different lengths take side by side.

    python benchmarks/sweeps.py [--jobs 12] [--slots 2] [--json sweeps.json]

The ideal is what the jobs themselves have taken, from the start of each process to its end, shared
evenly among the slots; or the longest job, if that takes longer. What a sweep takes beyond it is
its own start, gaps between jobs, and slots that are empty at its end.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# A job that trains nothing: the driver's time does not depend on what a job does.
JOB = "import sys, time; time.sleep(float(sys.argv[1].partition('=')[2]))"


def measured(num_jobs: int, num_slots: int, seed: int, longest: float) -> tuple[float, float]:
    """Seconds that jobs of random lengths take, and the ideal of the same jobs."""
    from harness.sweeps.driver import Driver
    from harness.sweeps.jobs import grid
    from harness.sweeps.slots import Needs, Slots
    from harness.sweeps.view import View

    draw = random.Random(seed)
    words = [[f"seconds={draw.uniform(longest / 10, longest):.3f}"] for _ in range(num_jobs)]
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null:
        view = View(["seconds"])
        took: list[float] = []
        begun: dict[int, float] = {}
        view.started = lambda job: begun.update({job.number: time.monotonic()})  # type: ignore[method-assign]
        view.ended = lambda job, _: took.append(time.monotonic() - begun[job.number])  # type: ignore[method-assign]
        program = [sys.executable, "-c", JOB]
        jobs, slots = grid(Path(folder), words, False), Slots(num_slots)
        start = time.monotonic()
        with contextlib.redirect_stdout(null):
            Driver(jobs, slots, program, lambda given: (Needs(), given), view).run()
        seconds = time.monotonic() - start
    return seconds, max(sum(took) / num_slots, max(took))


def trained(num_jobs: int, num_slots: int) -> tuple[float, float]:
    """The same for runs that train for 1 to ``num_jobs`` epochs, by the command of a user."""
    with tempfile.TemporaryDirectory() as folder:
        epochs = [*range(1, num_jobs + 1)]
        random.Random(0).shuffle(epochs)
        words = [f"trainer.max_epochs={','.join(map(str, epochs))}", "trainer.accelerator=cpu"]
        words += [f"output_dir={folder}", f"sweep.num_parallel={num_slots}", "watch=none"]
        start = time.monotonic()
        line = [sys.executable, "train.py", "-m", "experiment=synthetic", *words]
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(line, check=True, env=variables, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - start
        took = []
        for screen in Path(folder).glob("sweeps/*/*/*/screen.log"):
            made = (screen.parent / "overrides.yaml").stat().st_mtime
            took.append(screen.stat().st_mtime - min(made, _birth(screen)))
    return seconds, max(sum(took) / num_slots, max(took))


def _birth(path: Path) -> float:
    """When a file was made, as far as the system tells."""
    text = subprocess.run(["stat", "-c", "%W", path], capture_output=True, text=True, check=False)
    seconds = float(text.stdout.strip() or 0)
    return seconds if seconds > 0 else path.stat().st_mtime


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="draws of random lengths")
    parser.add_argument("--longest", type=float, default=10.0, help="seconds of a job")
    parser.add_argument("--train", action="store_true", help="also with runs that train")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, tuple[float, float]] = {}
    for seed in range(options.repeats):
        rows[f"jobs that sleep, draw {seed}"] = measured(
            options.jobs, options.slots, seed, options.longest
        )
    if options.train:
        rows["runs that train"] = trained(options.jobs, options.slots)
    print(f"| {options.jobs} jobs, {options.slots} slots | seconds | ideal | ratio |")
    print("|---|---|---|---|")
    for name, (seconds, ideal) in rows.items():
        print(f"| {name} | {seconds:.1f} | {ideal:.1f} | {seconds / ideal:.3f} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
