"""A real Slurm of two nodes, which are the two hosts: Debian's packages, started in a folder.

Needs root, iproute2, and ``apt-get install --no-install-recommends slurmctld slurmd slurm-client
munge``, which .ci/run does where it can. Nothing of it stays.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster import hosts
from tests.cluster.hosts import PATIENCE_SECONDS, Network, Started

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # Debian's daemons are in sbin
START_SECONDS = 60.0
# A login's credentials last 5 s, or a job that is put back in the queue waits for two minutes.
CONFIG = """
ClusterName=test
SlurmctldHost=host1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
ReturnToService=2
KillWait=20
SlurmdTimeout=20
NodeName=host1 NodeAddr=10.77.0.1 CPUs=4 RealMemory=4000
NodeName=host2 NodeAddr=10.77.0.2 CPUs=4 RealMemory=4000
PartitionName=main Nodes=host1,host2 Default=YES MaxTime=INFINITE GraceTime=30
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def missing() -> str:
    """Why there can be no Slurm here; empty where there can be."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PLACES) is None]
    if absent:
        packages = "slurmctld slurmd slurm-client munge"
        return f"Slurm is not installed: apt-get install --no-install-recommends {packages}"
    return hosts.missing()


class Slurm:
    """Two nodes that take jobs.

    Args:
        folder: for what its hosts write.
    """

    def __init__(self, folder: Path) -> None:
        self.network = Network(folder)
        # The path of a socket is at most 107 characters long.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm"))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PLACES}
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder))
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        try:
            self._start_daemons()
        except BaseException:
            self.close()
            raise

    def _start_daemons(self) -> None:
        first = self.network.hosts[0]
        files = [f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in MUNGE_FILES]
        self.daemons = [
            first.start(["munged", "--foreground", "--force", *files], self.environment)
        ]
        self.daemons[0].wait_until((self.folder / "munge.socket").exists, START_SECONDS)
        self.daemons.append(first.start(["slurmctld", "-D", "-c"], self.environment))
        for number in (1, 2):
            self.start_node(number)
        self.wait_until_idle()

    def start_node(self, number: int) -> None:
        """Start a node's daemon, also of one that was dead."""
        host = self.network.hosts[number - 1]
        (self.folder / f"spool.{host.name}").mkdir(exist_ok=True)
        self.daemons.append(host.start(["slurmd", "-D", "-N", host.name], self.environment))

    def wait_until_idle(self, seconds: float = START_SECONDS) -> None:
        """Wait until both nodes take jobs."""
        end = time.monotonic() + seconds
        while (states := self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T")) != "idle\nidle":
            assert time.monotonic() < end, f"{states}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The ends of what the daemons have said."""
        return "\n".join(daemon.screen()[-2000:] for daemon in self.daemons)

    def ask(self, *words: str) -> str:
        """What a command of Slurm's prints, whether it works or not."""
        command = self.network.hosts[0].start(words, self.environment)
        command.wait(START_SECONDS)
        return command.screen().strip()

    def srun(self, words: Sequence[str], *options: str) -> Started:
        """Start tasks, as a person does from a terminal: ``words`` are those of train.py."""
        line = ["srun", "--kill-on-bad-exit=1", *options, sys.executable, "train.py", *words]
        return self.network.hosts[0].start(line, self.environment)

    def submit(self, script: str | Path, *words: str, options: Sequence[str] = ()) -> str:
        """Hand in a job, and return its number.

        Args:
            script: a file; or the lines of one, less the first.
            words: of the script.
            options: of sbatch.
        """
        if isinstance(script, str):
            path = Path(tempfile.mkstemp(suffix=".sh", dir=self.folder)[1])
            path.write_text(f"#!/bin/bash\n{script}\n")
            script = path
        is_array = any(option.startswith("--array") for option in options)
        output = f"--output={self.folder}/{'%A_%a' if is_array else '%j'}.txt"
        said = self.ask(
            "sbatch", "--parsable", output, "--open-mode=append", *options, str(script), *words
        )
        assert said.isdigit(), said
        return said

    def screen(self, job: str) -> str:
        """What a job has printed in all its attempts."""
        path = self.folder / f"{job}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def about(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", "-o", job)))

    def state(self, job: str) -> str:
        """One of Slurm's words for where a job is."""
        return self.about(job).get("JobState", "")

    def wait(self, job: str, seconds: float = PATIENCE_SECONDS) -> str:
        """The word for how a job has ended; fails where it has not in time."""
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in ENDED:
            assert time.monotonic() < end, f"{state}: {self.about(job)}\n{self.screen(job)}"
            time.sleep(0.3)
        return state

    def wait_until(
        self, job: str, is_so: Callable[[], bool], seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Wait for something that a job does; fails where the job ends before."""
        end = time.monotonic() + seconds
        while not is_so():
            state = self.state(job)
            assert state not in ENDED, f"{state}\n{self.screen(job)}"
            assert time.monotonic() < end, f"{state}\n{self.screen(job)}"
            time.sleep(0.2)

    def clear(self) -> None:
        """Cancel all jobs."""
        self.ask("scancel", "--full", "--state=RUNNING", "--user=root", "--signal=KILL")
        self.ask("scancel", "--user=root")
        self.wait_until_idle()

    def close(self) -> None:
        """Kill the daemons and all jobs, and remove their files."""
        self.network.close()
        shutil.rmtree(self.folder, ignore_errors=True)


MUNGE_FILES = ("key-file", "socket", "pid-file", "log-file", "seed-file")
