"""A real Slurm of two nodes, which are the two hosts: Debian's packages, started in a folder.

Needs root, iproute2, and ``apt-get install --no-install-recommends slurmctld slurmd slurm-client
munge``, which .ci/run does where it can. Nothing of it stays.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster import hosts
from tests.cluster.hosts import Network, Started, wait_for

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # Debian's daemons are in sbin
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
        first, names = self.network.hosts[0], ("key", "pid", "log", "seed")
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in names]
        files.append(f"--socket={self.folder}/munge.socket")
        self.daemons = [
            first.start(["munged", "--foreground", "--force", *files], self.environment)
        ]
        self.daemons[0].wait_until((self.folder / "munge.socket").exists)
        self.daemons.append(first.start(["slurmctld", "-D", "-c"], self.environment))
        for number in (1, 2):
            self.start_node(number)
        self.wait_until_idle()

    def start_node(self, number: int) -> None:
        """Start a node's daemon, also of one that was dead."""
        host = self.network.hosts[number - 1]
        (self.folder / f"spool.{host.name}").mkdir(exist_ok=True)
        self.daemons.append(host.start(["slurmd", "-D", "-N", host.name], self.environment))

    def wait_until_idle(self) -> None:
        """Wait until both nodes take jobs."""
        ask = ("sinfo", "-h", "-N", "-p", "main", "-o", "%T")
        wait_for(
            lambda: self.ask(*ask) == "idle\nidle",
            lambda: [daemon.screen()[-2000:] for daemon in self.daemons],
            pause_seconds=0.2,
        )

    def ask(self, *words: str) -> str:
        """Return the output of a command of Slurm, whether it succeeds or not."""
        command = self.network.hosts[0].start(words, self.environment)
        command.wait()
        return command.screen().strip()

    def srun(self, overrides: Sequence[str], *options: str) -> Started:
        """Start tasks, as a user does from a terminal; ``overrides`` are those of train.py."""
        line = ["srun", "--kill-on-bad-exit=1", *options, sys.executable, "train.py", *overrides]
        return self.network.hosts[0].start(line, self.environment)

    def submit(self, script: Path, words: Sequence[str], array: str = "") -> str:
        """Submit a job, or an array of jobs, with arguments of its script; return its number."""
        options = [f"--output={self.folder}/{'%A_%a' if array else '%j'}.txt"]
        options += [f"--array={array}"] if array else []
        line = ["sbatch", "--parsable", "--open-mode=append", *options, str(script)]
        said = self.ask(*line, *words)
        assert said.isdigit(), said
        return said

    def screen(self, job: str) -> str:
        """Return the output of all attempts of a job."""
        path = self.folder / f"{job}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def about(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", "-o", job)))

    def state(self, job: str) -> str:
        """Return the state of a job, as Slurm names it."""
        return self.about(job).get("JobState", "")

    def wait(self, job: str) -> str:
        """The word for how a job has ended; fails where it has not in time."""
        wait_for(lambda: self.state(job) in ENDED, lambda: self.screen(job), pause_seconds=0.2)
        return self.state(job)

    def wait_until(self, job: str, is_so: Callable[[], bool]) -> None:
        """Wait for something that a job does; fails where the job ends before."""

        def is_so_now() -> bool:
            if is_so():
                return True
            assert (state := self.state(job)) not in ENDED, f"{state}\n{self.screen(job)}"
            return False

        wait_for(is_so_now, lambda: self.screen(job), pause_seconds=0.2)

    def clear(self) -> None:
        """Cancel all jobs."""
        self.ask("scancel", "--full", "--state=RUNNING", "--user=root", "--signal=KILL")
        self.ask("scancel", "--user=root")
        self.wait_until_idle()

    def close(self) -> None:
        """Kill the daemons and all jobs, and remove their files."""
        self.network.close()
        shutil.rmtree(self.folder, ignore_errors=True)
