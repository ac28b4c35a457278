"""``runs.py reproduce``: look for what is needed, make the run again, compare."""

import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import record
from harness.command import run_folder
from harness.errors import UserError
from harness.reproduce import equality, missing, rebuilding
from harness.reproduce.rebuilding import CODE, ENVIRONMENT, RUN
from harness.runs.reading import RunFiles

REPRODUCED = "reproduced"  # in the run's folder, where no list of runs looks
LOOK_SECONDS = 1.0


def reproduce(run: RunFiles, output: Path | None = None, has_environment: bool = False) -> bool:
    """Make a run again in a folder of its own, and print whether it has come to the same.

    Args:
        run: which has finished.
        output: the folder to make; ``None`` makes one inside of the run's.
        has_environment: whether the run's packages are installed for it.

    Returns:
        Whether weights, metrics and results are equal by bit.

    Raises:
        UserError: if something is missing, or the folder is in use.
    """
    place, start = missing.start_place(run), missing.starts_of(run)[-1]
    found, code = missing.look(run, place, has_environment), missing.code_of(run)
    if found.missing or code is None:
        raise UserError(refusal(run, found.missing))
    frozen, words = rebuilding.frozen_config(run), run_folder.load_words(run.folder)
    output = _make_folder(run, output)
    code_dir, run_dir = output / CODE, output / RUN
    try:
        found.differing += rebuilding.write_code(code, start, run.folder, code_dir)
        python: Path | str = sys.executable
        if has_environment:
            print("installing   the packages of then: minutes", flush=True)
            python = rebuilding.make_environment(run.folder, output / ENVIRONMENT)
    except UserError:
        shutil.rmtree(output)
        with suppress(OSError):  # it has others
            (run.folder / REPRODUCED).rmdir()
        raise
    run_dir.mkdir()
    frozen.run_dir = str(run_dir)
    run_folder.save_words(words, run_dir)
    run_folder.save_config(frozen, run_dir)
    for line in found.differing:
        print(f"differs      {line}")
    print(f"made again   in {output}", flush=True)
    known = run.record.get("data", {})
    process = subprocess.Popen(**rebuilding.command(python, code_dir, run_dir, start), cwd=place)
    status = _train(process, run_dir, known)
    now = record.read(run_dir)
    if others := ", ".join(missing.other_data(known, now.get("data", {}))):
        line = f"its data: those of {others} hold something else than then; bring them back"
        raise UserError(refusal(run, [line]))
    if status:
        raise UserError(
            f"{run.folder} cannot be made again: training ended with exit status {status}.\n"
            f"{run_dir / 'run.log'} and what is above say why."
        )
    latest: dict[str, Any] = (now.get("starts") or [{}])[-1]
    found.differing += missing.changes(start, latest, missing.ARITHMETIC)
    return _tell(equality.compare(run.folder, run_dir), found.differing)


def refusal(run: RunFiles, lines: list[str]) -> str:
    """Say what is missing."""
    return f"{run.folder} cannot be made again." + "".join(f"\n  missing  {line}" for line in lines)


def _make_folder(run: RunFiles, output: Path | None) -> Path:
    """A new folder, or an empty one that was asked for.

    Raises:
        UserError: if it is in use, or cannot be made.
    """
    named = output or run.folder / REPRODUCED / time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        named.mkdir(parents=True, exist_ok=output is not None)
        if any(named.iterdir()):
            raise UserError(f"--output={named} is not empty. Name a new folder.")
    except OSError as error:
        raise UserError(f"{named} cannot be made: {error.strerror}. Use --output.") from error
    return named.resolve()


def _train(process: "subprocess.Popen[bytes]", run_dir: Path, data: dict[str, Any]) -> int:
    """The exit status of a training, which ends early where it has begun with other data."""
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(LOOK_SECONDS)
            if missing.other_data(data, record.read(run_dir).get("data", {})):
                process.send_signal(signal.SIGTERM)
                return process.wait()
    except KeyboardInterrupt as error:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise UserError(f"Stopped by Ctrl-C; {run_dir} holds what there was.") from error


def _tell(files: list[equality.Compared], differing: list[str]) -> bool:
    """Print what was compared, and whether all of it is equal."""
    width = max(len(file.name) for file in files)
    for file in files:
        verdict = "equal by bit" if file.is_equal else "NOT EQUAL   "
        print(f"{file.name:{width}}  {verdict}  {file.said}")
    is_equal = all(file.is_equal for file in files)
    if is_equal:
        print("The run was reproduced: equal by bit.")
    else:
        why = "".join(f"\n  {line}" for line in differing) or " nothing that was noted."
        print(f"The run was not reproduced. What is not as it was:{why}")
    return is_equal
