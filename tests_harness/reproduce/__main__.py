"""Make runs of all kinds, change the code, and make each again: the figure of docs/runs.md.

python -m tests_harness.reproduce                     all of them, some ten minutes on two cores
python -m tests_harness.reproduce --only killed       those whose names hold a word
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.images.examples import write_shapes
from tests_harness.conftest import ROOT
from tests_harness.reproduce.project import QUIET, Project

SHORT = ("trainer.max_epochs=2", "trainer.log_every_n_steps=3")
TWO = ("trainer.devices=2", "trainer.accelerator=cpu")
SEVERAL = ("experiment=synthetic", *SHORT, *TWO)
# An experiment of each kind is added to these.
RUNS: dict[str, tuple[str, ...]] = {
    "ddp, two processes": (*SEVERAL, "strategy=ddp"),
    "ddp_spawn, two processes": (*SEVERAL, "strategy=ddp_spawn"),
    "dp, two devices": (*SEVERAL, "strategy=dp", "model=cnn"),
    "ddp2, two devices": (*SEVERAL, "strategy=ddp2"),
    "averaged weights, top 3": ("experiment=synthetic", *SHORT, "callbacks=[ema,top_k]"),
    "data workers, validations within": (
        "experiment=synthetic",
        *SHORT,
        "data.num_workers=2",
        "trainer.val_check_interval=4",
        "trainer.accumulate_grad_batches=2",
    ),
    "a table of one's own": ("experiment=table", *SHORT, "data.file=rows.csv", "data.target=y"),
    "dirty tree": ("experiment=synthetic", *SHORT),
    "killed and resumed": ("experiment=synthetic", "trainer.max_epochs=30"),
    "killed and resumed, ddp": (*SEVERAL, "strategy=ddp", "trainer.max_epochs=30"),
}
OF_EXPERIMENT = {
    "images": ("data.root=shapes", "data.size=32", "trainer.max_epochs=1"),
    "text": ("trainer.max_epochs=1", "data.batch_size=128"),
}
# What a dirty tree trains with.
CHANGED = "MLP.forward = lambda self, x: self.layers(x / 2)"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="runs whose names hold this")
    options = parser.parse_args()
    runs = dict(RUNS)
    for path in sorted((ROOT / "conf" / "experiment").glob("*.yaml")):
        name = path.stem
        runs[f"experiment {name}"] = (f"experiment={name}", *SHORT, *OF_EXPERIMENT.get(name, ()))
    runs = {name: words for name, words in runs.items() if options.only in name}
    with tempfile.TemporaryDirectory() as folder:
        project = Project.copied(Path(folder, "project"))
        write_data(project.folder)
        folders = {}
        for number, (name, words) in enumerate(runs.items()):
            print(f"train      {name}", flush=True)
            folders[name] = made(project, f"run_{number}", name, words)
        project.append("models/mlp.py", "raise RuntimeError('of today')")
        num_equal = 0
        for name, run_dir in folders.items():
            result = project.reproduce(run_dir)
            num_equal += (is_equal := result.returncode == 0)
            print(f"{'equal by bit' if is_equal else 'NOT EQUAL'}  {name}", flush=True)
            if not is_equal:
                print(result.stdout[-3000:], result.stderr[-3000:])
    print(f"{num_equal} of {len(runs)} equal by bit")
    return 0 if num_equal == len(runs) else 1


def write_data(folder: Path) -> None:
    """Write what the runs read."""
    write_shapes(folder / "shapes", num=20)
    lines = [f"{i % 7},{i % 11},{i % 7 - i % 11 / 3}" for i in range(300)]
    (folder / "rows.csv").write_text("\n".join(["a,b,y", *lines]) + "\n")


def made(project: Project, folder: str, name: str, words: tuple[str, ...]) -> Path:
    """Train as the name of a run says."""
    if name == "dirty tree":
        project.append("models/mlp.py", CHANGED)
    if not name.startswith("killed"):
        return project.train(folder, *words)
    words = (*words, "checkpoint.every_n_steps=2", "resume=auto")
    for step in (6, 30):
        kill_after(project, step, folder, *words)
    return project.train(folder, *words)


def kill_after(project: Project, step: int, name: str, *words: str) -> None:
    """Kill a run when it has saved a step, with all of its processes."""
    command = [sys.executable, "train.py", *QUIET, *words, f"name={name}"]
    where = {"cwd": project.folder, "env": project.environment}
    process = subprocess.Popen(command, **where, stdout=subprocess.DEVNULL)  # type: ignore[call-overload]
    runs = project.folder / "outputs" / name
    while process.poll() is None:
        saved = [int(p.stem[5:]) for p in runs.glob("*/checkpoints/step_*.ckpt")]
        if max(saved, default=0) >= step:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.005)
    assert process.returncode == -signal.SIGKILL, "it has ended before it was killed"


if __name__ == "__main__":
    sys.exit(main())
