"""Run the jobs of a sweep as Slurm jobs, by submitit. Imports no torch.

A Slurm job runs the same command as on one machine, once in each task of srun. If the driver ends,
its Slurm jobs continue. All of them have the sweep's name, and each has its number as its comment:
so the next driver finds them in squeue, even if the last one was killed while it submitted them.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import provenance
from harness.distributed import parent_process
from harness.errors import UserError, print_text
from harness.sweeps.queue import SCREEN, Job, note_failure

NOTE = "slurm_job.txt"  # the id of a job's latest Slurm job, in its folder; empty during sbatch
SUBMIT_SECONDS = 60.0  # after its driver was killed, an sbatch may take this long to submit its job
FILE_SECONDS = 60.0  # a network file system may hide a new file for this long
UNCERTAIN = re.compile("timed out|[Cc]ontact|[Cc]onnect|[Cc]ommunic")  # may have submitted the job
VARIABLES = re.compile("SLURM_(?!CONF$|JWT$)|SBATCH_|SQUEUE_")
ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"),
    *("DEADLINE", "OUT_OF_MEMORY", "REVOKED", "GONE"),  # GONE: squeue has forgotten the job
)
# The same lines as in the template's scripts/slurm/train.sbatch, which explains them.
REQUEUE = """\
status=$?
[[ $status == 0 ]] || timeout 60 srun --ntasks-per-node=1 --ntasks="$SLURM_NNODES" true || sleep 600
if [[ $status == 75 && $(squeue -h -j "$SLURM_JOB_ID" -o %T) == RUNNING ]]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit $status"""


def check(settings: dict[str, Any]) -> None:
    """Raise a ``UserError`` if this machine cannot submit jobs with the settings of ``sweep``."""
    if taken := {"array", "comment", "job_name"} & settings["sbatch"].keys():
        raise UserError(f"sweep.sbatch.{min(taken)}: the sweep sets this option. Leave it out.")
    if "clusters" in settings["sbatch"]:  # squeue would look at this machine's cluster only
        raise UserError("sweep.sbatch.clusters: submit from a machine of that cluster instead.")
    if settings["sbatch"].get("time") is None:  # submitit's default is 5 minutes
        raise UserError("sweep.sbatch.time has no value. Add sweep.sbatch.time=<hours>:00:00.")
    if settings.get("dry_run"):
        return
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise UserError("sweep=slurm needs submitit: pip install -e '.[slurm]'") from error
    for program in ("sbatch", "srun", "squeue"):
        if shutil.which(program) is None:
            raise UserError(
                f"sweep=slurm: this machine has no {program}. Type the command on a machine that "
                "submits to Slurm,\nor leave out sweep=slurm to run the jobs here."
            )


class SlurmJobs:
    """The Slurm jobs of a sweep.

    Args:
        folder: of the sweep. The scripts are in ``slurm/`` there.
        program: the command to which a job's overrides are appended.
        settings: those of ``sweep`` in ``conf/sweep/slurm.yaml``.
        num_parallel: how many jobs may be in Slurm's queue at the same time.
        cluster: ``local`` starts processes of this machine, for tests.
    """

    def __init__(
        self,
        folder: Path,
        program: Sequence[str],
        settings: dict[str, Any],
        num_parallel: int,
        cluster: str = "slurm",
    ) -> None:
        folder = folder.resolve()
        self.scripts, self.cluster, self.num_parallel = folder / "slurm", cluster, num_parallel
        self.program, self.settings = program, settings
        name = f"{folder.parent.name}_{folder.name}_{zlib.crc32(os.fsencode(folder)):08x}"
        self.name = re.sub(r"[^\w.-]", "_", name)
        self.running: dict[int, tuple[Job, str, float]] = {}  # with the Slurm job's id, and a time
        self.listed: dict[int, tuple[str, str]] = {}  # id and state by the job's number
        self.listed_time = self.polled_time = self.next_time = -1.0
        self.seen: dict[int, float] = {}  # when a job was first seen to end
        self.is_silent = False  # whether squeue did not answer last time
        # In a shell that is itself a Slurm job, sbatch would use the settings of that job. The
        # variables of sbatch and squeue would replace our options.
        for variable in [v for v in os.environ if VARIABLES.match(v)]:
            del os.environ[variable]

    def command(self, job: Job) -> list[str]:
        """Return a job's command. The variable names its folder, and no process to follow."""
        variable = f"{parent_process.PARENT}=0:job:{job.folder}"
        return ["env", variable, *self.program, *job.overrides]

    def parameters(self, job: Job) -> dict[str, Any]:
        """Return submitit's parameters for a job."""
        given = self.settings["sbatch"].items()
        options = {key: value for key, value in given if value is not None and value is not False}
        screen = str(job.folder / SCREEN)
        fixed = {"comment": job.number, "output": screen, "requeue": True, "signal": "USR1@300"}
        return {
            "name": self.name,
            "stderr_to_stdout": True,
            "slurm_setup": self.settings.get("setup", []),
            "slurm_srun_args": ["--kill-on-bad-exit=1", "--open-mode=append", "--output", screen],
            "slurm_teardown": REQUEUE.splitlines(),
            "slurm_additional_parameters": fixed | options,
        }

    def preview(self, job: Job) -> str:
        """Return a job's script, as a text for ``sweep.dry_run=true``."""
        given = self.parameters(job)
        options = {"job_name": self.name} | given["slurm_additional_parameters"]
        lines = [
            f"#SBATCH --{key.replace('_', '-')}{'' if value is True else f'={value}'}"
            for key, value in options.items()
        ]
        srun = shlex.join(["srun", *given["slurm_srun_args"], *self.command(job)])
        return "\n".join([*lines, *given["slurm_setup"], srun, *given["slurm_teardown"]])

    def start(self, job: Job) -> str:
        """Submit a job, unless Slurm has it already, and return a text.

        Raises:
            UserError: Slurm refuses the job, or does not answer.
        """
        job.folder.mkdir(exist_ok=True)
        note = job.folder / NOTE
        self._ask()
        while (slurm_job := self._active(job)) is None and _is_being_submitted(note):
            time.sleep(1.0)
            self.next_time = 0.0
            self._ask()
        text = f"is still Slurm job {slurm_job}"
        if slurm_job is None:
            slurm_job = self._submit(job, note)
            text = f"is submitted as Slurm job {slurm_job}"
        elif not note.exists() or not note.read_text():
            self._complete(job, slurm_job, note)
        self.running[job.number] = job, slurm_job, time.monotonic()
        return text

    def _complete(self, job: Job, slurm_job: str, note: Path) -> None:
        """Write the file that a Slurm job waits for, if its driver was killed before it did so."""
        from submitit.helpers import DelayedSubmission

        file = self.scripts / f"{slurm_job}_submitted.pkl"
        if not file.exists():
            command = self.command(job)
            self.scripts.mkdir(exist_ok=True)
            DelayedSubmission(os.execvp, command[0], command).dump(file)
        note.write_text(slurm_job)

    def _submit(self, job: Job, note: Path) -> str:
        import submitit

        note.write_text("")
        # Ctrl-C in the terminal must not stop sbatch, which may have submitted the job already.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            executor = submitit.AutoExecutor(self.scripts, cluster=self.cluster)
            executor.update_parameters(**self.parameters(job))
            # The command replaces submitit's process, and so its handlers of signals.
            command = self.command(job)
            slurm_job = str(executor.submit(os.execvp, command[0], command).job_id)
        except RuntimeError as error:
            if not UNCERTAIN.search(str(error)):  # else the next start waits, and asks squeue
                note.unlink()
            raise UserError(f"sbatch did not submit job {job.number}: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        note.write_text(slurm_job)
        return slurm_job

    def poll(self) -> list[Job]:
        """Return the jobs that have ended since the last call, with the reason in their folders."""
        try:
            self._ask()
            self.is_silent = False
        except UserError as error:
            if not self.is_silent:
                print_text(f"{error}\nThe sweep waits for Slurm.")
            self.is_silent = True
        if self.listed_time == self.polled_time:
            return []
        self.polled_time = self.listed_time
        is_known = [entry for entry in self.running.values() if entry[2] < self.listed_time]
        ended = [job for job, slurm_job, _ in is_known if self._has_ended(job, slurm_job)]
        for job in ended:
            del self.running[job.number]
        return ended

    def _has_ended(self, job: Job, slurm_job: str) -> bool:
        state = self.listed.get(job.number, ("", "GONE"))[1]
        if state not in (*ENDED, "COMPLETING"):
            self.seen.pop(job.number, None)
            return False
        if (status := job.run["status"]) in ("finished", "failed"):
            return True
        since = time.monotonic() - self.seen.setdefault(job.number, time.monotonic())
        if state == "COMPLETING" or (state == "COMPLETED" and since < FILE_SECONDS):
            return False
        reason = f"Slurm job {slurm_job} ended as {state}: see {SCREEN}"
        if state == "FAILED":
            note_failure(job, reason)
        elif status == "stopped" and state != "GONE":
            provenance.note(job.folder, reason=reason)
        return True

    def stop(self, signum: int) -> bool:
        """Print that the jobs continue without the driver."""
        text = f"{signal.Signals(signum).name}: {len(self.running)} Slurm jobs continue. To cancel"
        print_text(f"{text} them, type: scancel --name={self.name}")
        return False

    def _active(self, job: Job) -> str | None:
        """Return the id of the Slurm job that runs a job, or waits to run it."""
        slurm_job, state = self.listed.get(job.number, ("", "GONE"))
        return None if state in ENDED else slurm_job

    def _ask(self) -> None:
        """List the sweep's Slurm jobs, at most every ``sweep.poll_seconds``.

        Raises:
            UserError: Slurm does not answer.
        """
        if self.cluster != "slurm" or time.monotonic() < self.next_time:
            return
        begin = time.monotonic()
        command = ["squeue", "--me", f"--name={self.name}", "--states=all", "--noheader"]
        answer = subprocess.run(
            [*command, "--format=%k %i %T"], capture_output=True, text=True, start_new_session=True
        )
        self.next_time = time.monotonic() + self.settings.get("poll_seconds", 1)
        if answer.returncode:
            raise UserError(f"squeue does not answer: {answer.stderr.strip()}")
        self.listed_time = begin
        rows = [line.split() for line in answer.stdout.splitlines()]
        # The last Slurm job of a number is the one that counts.
        rows.sort(key=lambda row: int(row[1]))
        self.listed = {int(number): (slurm_job, state) for number, slurm_job, state in rows}


def _is_being_submitted(note: Path) -> bool:
    """Return whether the sbatch of a killed driver may still submit the job."""
    if not note.exists() or note.read_text():
        return False
    return time.time() - note.stat().st_mtime < SUBMIT_SECONDS
