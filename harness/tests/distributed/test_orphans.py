"""No process outlives the one that started the run, whenever that one is killed."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from harness.checkpoints.reading import newest_intact
from tests.cluster.hosts import Started, wait_for
from tests.conftest import ROOT, slow
from tests.faults.fork_server import command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's kernel ends orphans")

MARK = "MARK_OF_THE_TEST"
PATIENCE_SECONDS = 120.0  # of a busy machine; a process that waits for others waits longer
QUIET_SECONDS = 0.5
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
TORCHRUN += ["--rdzv-endpoint=localhost:0"]
WORDS = [
    "data=synthetic", "model=mlp", "model.net.hidden=[1024,1024]", "data.num_workers=1",
    "trainer.accelerator=cpu", "trainer.max_epochs=2", "resume=auto",
    "+callbacks.trace._target_=tests.faults.trace.Trace",
    "+callbacks.trace.seconds_per_batch=0.1",
    "+callbacks.trace.seconds_per_validation=3",
    "+callbacks.trace.seconds_per_test=3",
]  # fmt: skip
DDP = ["strategy=ddp", "trainer.devices=2"]


class Run(Started):
    """A command of which every process can be found."""

    def __init__(self, folder: Path, *words: str, program: Sequence[str]) -> None:
        self.folder, self.token = folder, uuid.uuid4().hex
        where = [f"output_dir={folder}", f"+callbacks.trace.folder={folder}/trace"]
        with (folder / "screen.txt").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *program, "train.py", *WORDS, *where, *words],
                cwd=ROOT,
                env=os.environ | {MARK: self.token},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        super().__init__(process, folder / "screen.txt")

    def others(self) -> list[int]:
        """The living processes but the first."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = f"{MARK}={self.token}".encode() in (path / "environ").read_bytes()
                is_alive = (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            except OSError:  # it has ended meanwhile
                continue
            if is_ours and is_alive and int(path.name) != self.process.pid:
                found.append(int(path.name))
        return found

    def end(self, signum: int) -> None:
        """Send a signal to the main process, and wait until none is left."""
        self.process.send_signal(signum)
        self.wait()
        gone_time = time.monotonic()

        def are_gone() -> bool:
            nonlocal gone_time
            if self.others():
                gone_time = time.monotonic()
            # A process that is about to run another program has no environment for a moment.
            return time.monotonic() > gone_time + QUIET_SECONDS

        wait_for(are_gone, self.screen, PATIENCE_SECONDS, pause_seconds=0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def begin(*words: str, program: Sequence[str] = ()) -> Run:
        started.append(Run(tmp_path, *words, program=program))
        return started[-1]

    yield begin
    for run in started:
        for pid in [run.process.pid, *run.others()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


def imports_torch(run: Run) -> bool:
    for pid in run.others():
        with suppress(OSError):
            if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False


def has(name: str, size: int = 0) -> Callable[[Run], bool]:
    return lambda run: any(p.stat().st_size >= size for p in run.folder.glob(f"trace/{name}"))


DURING: dict[str, Callable[[Run], object]] = {
    "epoch": has("steps_0", 7),
    "validation": has("validation_0"),
    "writing": lambda run: any(run.folder.glob("default/*/checkpoints/.*.part")),
    "test": has("test_0"),
}
MOMENTS = DURING | {
    "start": Run.others,
    "imports": imports_torch,
    "folder": lambda run: (run.folder / "default").exists(),
}


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["imports", *DURING])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_outlives_torchrun(
    signum: signal.Signals, moment: str, start: Callable[..., Run]
) -> None:
    run = start(*DDP, program=TORCHRUN)
    run.wait_until(lambda: MOMENTS[moment](run))
    run.end(signum)
    if moment in DURING:
        (run_dir,) = (run.folder / "default").iterdir()
        assert newest_intact(run_dir / "checkpoints")[0] is not None, run.screen()


@pytest.mark.parametrize("moment", ["imports", *slow("start", "folder", *DURING)])
def test_nobody_outlives_the_first_process(moment: str, start: Callable[..., Run]) -> None:
    run = start(*DDP)
    run.wait_until(lambda: MOMENTS[moment](run))
    run.end(signal.SIGKILL)
    assert len(list(run.folder.glob("default/*"))) <= 1  # no process has started another run


@pytest.mark.slow
def test_run_goes_on_after_its_launcher_was_killed(start: Callable[..., Run]) -> None:
    run = start(*DDP, program=TORCHRUN)
    run.wait_until(lambda: MOMENTS["epoch"](run))
    run.end(signal.SIGKILL)
    assert "SIGTERM: saved step" in run.screen()
    again = command("train.py", "resume=auto", f"output_dir={run.folder}", "strategy=cpu")
    assert again.returncode == 0, again.stderr
    (run_dir,) = (run.folder / "default").iterdir()
    assert "has ended." in (run_dir / "run.log").read_text()
