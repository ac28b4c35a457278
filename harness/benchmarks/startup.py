"""Measure how long commands take; those that train, until the end of their first step.

    python benchmarks/startup.py [--repeats 7]

All times are compared with the time to import Lightning. A training must import it, and the other
commands must not.
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import contest

PYTHON = sys.executable
TRAIN = [PYTHON, "train.py", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
ONE_STEP = ["trainer.max_steps=1", "trainer.limit_val_batches=0", "test=false"]
FIRST_STEP = [*TRAIN, *ONE_STEP, "+callbacks.first_step._target_=startup.FirstStep"]
COMMANDS = {
    "import pytorch_lightning": [PYTHON, "-c", "import pytorch_lightning"],
    "train.py --help": [PYTHON, "train.py", "--help"],
    "unknown key": [PYTHON, "train.py", "trainer.devcies=2"],
    "no such checkpoint": [PYTHON, "evaluate.py", "checkpoint=nope.ckpt"],
    "first step": FIRST_STEP,
    "first step, ddp(2)": [*FIRST_STEP, "strategy=ddp", "trainer.devices=2"],
}
NOTE = "FIRST_STEP_FILE"

if NOTE in os.environ:  # in a run; the other commands must not pay for this import
    import pytorch_lightning as pl

    class FirstStep(pl.Callback):
        """Note when the first step has ended."""

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.is_global_zero and trainer.global_step == 1:
                Path(os.environ[NOTE]).write_text(str(time.time()))


def seconds(command: list[str]) -> float:
    """Return the time from the start to the end, or to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        note = Path(folder, "first_step")
        if "test=false" in command:
            path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
            environment |= {NOTE: str(note), "PYTHONPATH": path}
        if "trainer.accelerator=cpu" in command:
            command = [*command, f"output_dir={folder}"]
        started = time.time()
        subprocess.run(command, cwd=contest.ROOT, env=environment, capture_output=True, check=False)
        ended = float(note.read_text()) if NOTE in environment else time.time()
        return ended - started


def main() -> None:
    options = contest.arguments(__doc__ or "", repeats=7).parse_args()
    turns = {name: partial(seconds, command) for name, command in COMMANDS.items()}
    contest.take_turns(turns, 1)  # fills the disk cache
    figures = contest.take_turns(turns, options.repeats)
    contest.show("command", "seconds", figures)


if __name__ == "__main__":
    main()
