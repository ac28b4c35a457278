"""Nobody outlives who has started a run, at whatever moment that one is killed."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import lookup
from tests_harness.conftest import ROOT
from tests_harness.faults.fork_server import command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's kernel ends orphans")

MARK = "MARK_OF_THE_TEST"
PATIENCE_SECONDS = 120  # of a busy machine; a process that waits for others waits much longer
QUIET_SECONDS = 0.5
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
TORCHRUN += ["--rdzv-endpoint=localhost:0"]
# It adopts whoever torchrun leaves, as do the first process of a container and systemd.
ADOPTER = """
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
subprocess.Popen([sys.executable, *sys.argv[1:]])
time.sleep(10000)
"""
SHELL = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
WORDS = [
    "data=synthetic", "model=mlp", "model.net.hidden=[1024,1024]", "data.num_workers=1",
    "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=2", "resume=auto",
    "+callbacks.trace._target_=tests_harness.faults.trace.Trace",
    "+callbacks.trace.seconds_per_batch=0.1",
    "+callbacks.trace.seconds_per_validation=3",
    "+callbacks.trace.seconds_per_test=3",
]  # fmt: skip


class Started:
    """A command of which every process, whoever has started it, can be found."""

    def __init__(self, folder: Path, *words: str, program: list[str] | None = None) -> None:
        self.folder, self.token = folder, uuid.uuid4().hex
        where = [f"output_dir={folder}", f"+callbacks.trace.folder={folder}/trace"]
        self.log = (folder / "screen.txt").open("w")
        self.process = subprocess.Popen(
            [sys.executable, *(program or []), "train.py", *WORDS, *where, *words],
            cwd=ROOT,
            env=os.environ | {MARK: self.token},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def others(self) -> list[int]:
        """The living processes but the first, the oldest first."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = f"{MARK}={self.token}".encode() in (path / "environ").read_bytes()
                is_alive = (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            except OSError:  # it has ended meanwhile
                continue
            if is_ours and is_alive and int(path.name) != self.process.pid:
                found.append(int(path.name))
        return sorted(found)

    def wait_until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, self.screen()
            assert time.monotonic() < end, self.screen()
            time.sleep(0.002)

    def screen(self) -> str:
        return (self.folder / "screen.txt").read_text()

    def everybody_leaves(self) -> bool:
        end, gone_time = time.monotonic() + PATIENCE_SECONDS, time.monotonic()
        while (now := time.monotonic()) < end:
            if self.others():
                gone_time = now
            # A process that is about to run another program has no environment for a moment.
            elif now > gone_time + QUIET_SECONDS:
                return True
            time.sleep(0.01)
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def begin(*words: str, program: list[str] | None = None) -> Started:
        started.append(Started(tmp_path, *words, program=program))
        return started[-1]

    yield begin
    for run in started:
        for pid in [run.process.pid, *run.others()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()
        run.log.close()


def have_imported_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def are_started(run: Started) -> bool:
    return len(run.others()) >= 1


def import_torch(run: Started) -> bool:
    return any(map(have_imported_torch, run.others()))


def choose_the_folder(run: Started) -> bool:
    """One of them has a connection to the store, or soon will."""
    return (run.folder / "default").exists()


def file(name: str, size: int = 0) -> Callable[[Started], bool]:
    def is_there(run: Started) -> bool:
        path = run.folder / "trace" / name
        return path.exists() and path.stat().st_size >= size

    return is_there


def are_writing(run: Started) -> bool:
    return any(run.folder.glob("default/*/checkpoints/.*.part"))


BEFORE = {
    "start": are_started,
    "imports": import_torch,
    "folder": choose_the_folder,
}
DURING = {
    "first step": file("steps_0", 1),
    "epoch": file("steps_0", 7),
    "validation": file("validation_0"),
    "writing": are_writing,
}
AFTER = {"test": file("test_0")}
# Of each kind of moment one; the others take minutes.
QUICK = {
    *((signal.SIGKILL, moment) for moment in ("start", "imports", "writing")),
    (signal.SIGTERM, "epoch"),
    *(("ddp", moment) for moment in ("start", "imports", "epoch")),
}


def cells(rows: Iterable[object], moments: Iterable[str]) -> list[Any]:
    """Each row at each moment."""
    return [
        pytest.param(row, moment, marks=[] if (row, moment) in QUICK else pytest.mark.slow)
        for row in rows
        for moment in moments
    ]


@pytest.mark.parametrize(
    ("signum", "moment"),
    cells([signal.SIGKILL, signal.SIGTERM], [*BEFORE, *DURING, *AFTER]),
)
def test_nobody_outlives_torchrun(
    signum: signal.Signals, moment: str, start: Callable[..., Started]
) -> None:
    run = start("strategy=ddp", program=TORCHRUN)
    reached = (BEFORE | DURING | AFTER)[moment]
    run.wait_until(lambda: reached(run))
    run.process.send_signal(signum)
    run.process.wait(PATIENCE_SECONDS)
    assert run.everybody_leaves(), run.screen()
    if moment not in BEFORE:
        (run_dir,) = (run.folder / "default").iterdir()
        assert lookup.newest_whole(run_dir / "checkpoints")[0] is not None, run.screen()


@pytest.mark.parametrize("moment", ["start", pytest.param("imports", marks=pytest.mark.slow)])
def test_python_program_that_adopts_is_not_taken_for_torchrun(
    moment: str, start: Callable[..., Started]
) -> None:
    run = start("strategy=ddp", program=["-c", ADOPTER, *TORCHRUN])
    run.wait_until(run.others)
    (torchrun,) = run.others()
    # Whose own memory has torch as well.
    run.wait_until(
        lambda: any(
            moment == "start" or have_imported_torch(pid) for pid in run.others() if pid != torchrun
        )
    )
    os.kill(torchrun, signal.SIGKILL)
    assert run.everybody_leaves(), run.screen()


@pytest.mark.parametrize(
    ("strategy", "moment"),
    cells(["ddp"], ["start", "imports", "first step", "epoch", "validation", "test"]),
)
def test_nobody_outlives_the_first_process(
    strategy: str, moment: str, start: Callable[..., Started]
) -> None:
    run = start(f"strategy={strategy}")
    reached = (BEFORE | DURING | AFTER)[moment]
    run.wait_until(lambda: reached(run))
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(PATIENCE_SECONDS)
    assert run.everybody_leaves(), run.screen()
    assert len(list((run.folder / "default").iterdir())) <= 1  # no other process has begun anew


def test_run_goes_on_after_its_launcher_was_killed(start: Callable[..., Started]) -> None:
    run = start("strategy=ddp", program=TORCHRUN)
    run.wait_until(lambda: file("steps_0", 7)(run))
    run.process.send_signal(signal.SIGKILL)
    assert run.everybody_leaves()
    assert "SIGTERM: saved step" in run.screen()
    again = command("train.py", "resume=auto", f"output_dir={run.folder}", "strategy=cpu")
    assert again.returncode == 0, again.stderr
    (run_dir,) = (run.folder / "default").iterdir()
    assert "has ended." in (run_dir / "run.log").read_text()


def test_closed_shell_ends_no_run_that_a_person_started(start: Callable[..., Started]) -> None:
    """``nohup python train.py &``, and the shell ends; SIGHUP is what nohup keeps away."""
    shell = start("strategy=cpu", "trainer.devices=1", program=["-c", SHELL])
    shell.wait_until(lambda: file("steps_0", 1)(shell))
    shell.process.kill()
    shell.process.wait()
    steps = shell.folder / "trace" / "steps_0"
    (pid, *_) = shell.others()
    num_steps = steps.stat().st_size
    end = time.monotonic() + PATIENCE_SECONDS
    while steps.stat().st_size < num_steps + 5 and time.monotonic() < end:
        time.sleep(0.1)
    assert steps.stat().st_size >= num_steps + 5
    assert pid in shell.others()
