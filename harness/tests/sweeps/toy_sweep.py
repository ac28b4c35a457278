"""A sweep of toy jobs, which take a second and no torch, and a driver that tests may kill.

python -m tests.sweeps.toy_sweep FOLDER NUM_PARALLEL WORDS WORDS ...
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

import harness  # noqa: F401  # follows the driver, as every run does
from harness import record
from harness.files import write_durably
from harness.processes import launch
from harness.sweeps.driver import Driver, Job, Queue

CONFIG = b"{data: {}, model: {}, objective: val/loss, mode: min}\n"
SAMPLER = {"_target_": "optuna.samplers.RandomSampler"}
PROGRAM = [sys.executable, "-m", __spec__.name, "--job"]  # type: ignore[union-attr]
asked = 0


def note(signum: int, frame: object) -> None:
    global asked
    asked = signum


def job(words: list[str]) -> None:
    """Take steps, each written down, and go on from the last one."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, note)
    folder = launch.folder_of_job()
    assert folder is not None
    settings = dict(word.split("=") for word in words)
    with (folder / ".lock").open("a") as lock, (folder.parent / "trace").open("a") as trace:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where there are two

        def tell(event: str) -> None:
            devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            line = [time.monotonic(), folder.name, event, devices]
            trace.write(json.dumps(line) + "\n")
            trace.flush()

        tell("start")
        write_durably(folder / "config.yaml", CONFIG)
        if settings.get("fails") == "1":
            record.note(folder, status="failed", reason="It cannot be.")
            sys.exit(1)
        state = folder / "state"
        done = json.loads(state.read_text()) if state.exists() else []
        while len(done) < int(settings["steps"]):
            time.sleep(0.02)
            done.append(len(done) * float(settings.get("seed", 1)))
            write_durably(state, json.dumps(done).encode())
            rows = "".join(f"{step},{settings.get('seed', 1)}\n" for step in range(len(done)))
            write_durably(folder / "metrics.csv", f"step,val/loss\n{rows}".encode())
            tell(f"step {len(done)}")
            if asked:
                record.note(folder, status="stopped", reason=f"by signal {asked}")
                sys.exit(128 + asked)
        if (folder / "results.json").exists():
            tell("again")
        write_durably(folder / "results.json", json.dumps({"sum": sum(done)}).encode())
        tell("end")


def queue_of(folder: Path, typed: list[list[str]]) -> Queue:
    """Make a grid of what is typed, or a study where a number of trials is asked for."""
    if "TRIALS" not in os.environ:
        return Queue([Job(i, words, folder / str(i)) for i, words in enumerate(typed)])
    from harness.sweeps.study import Study

    words = OverridesParser.create().parse_overrides(typed[0])
    settings = {"sampler": SAMPLER, "num_trials": int(os.environ["TRIALS"])}
    settings["storage"] = os.environ.get("STORAGE")
    return Study(settings, "min", words).open(folder)


def main(folder: Path, num_parallel: int, typed: list[list[str]]) -> int:
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / ".lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        queue = queue_of(folder, typed)
        slots = [{"CUDA_VISIBLE_DEVICES": str(number)} for number in range(num_parallel)]
        signum = Driver(queue, PROGRAM, slots).run()
        is_whole = all(job.status == "finished" for job in queue.jobs)
        return 128 + signum if signum else int(not is_whole)


if __name__ == "__main__":
    if sys.argv[1] == "--job":
        job(sys.argv[2:])
    else:
        there, parallel, *typed = sys.argv[1:]
        sys.exit(main(Path(there), int(parallel), [words.split() for words in typed]))
