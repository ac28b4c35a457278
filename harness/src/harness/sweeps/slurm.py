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
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import provenance
from harness.distributed import parent_process
from harness.errors import UserError, print_text
from harness.sweeps.queue import SCREEN, Job, note_failure
from harness.sweeps.squeue import ENDED, SlurmList

NOTE = "slurm_job.txt"  # the id of a job's latest Slurm job, in its folder; empty during sbatch
SUBMIT_SECONDS = 60.0  # after its driver was killed, an sbatch may take this long to submit its job
FILE_SECONDS = 60.0  # a network file system may hide a new file for this long
MAX_FAILURES = 5  # calls of sbatch in a row without an answer
UNCERTAIN = re.compile(  # errors of Slurm's network; sbatch may have submitted the job
    "timed out|Unable to contact|[Cc]onnect|[Cc]ommunic|Zero Bytes|temporarily|standby"
)
FAILURE = f"Slurm job {{}} failed before its run began: see {SCREEN}"
VARIABLES = re.compile(f"{parent_process.OF_SLURM}|SBATCH_|SQUEUE_")
# The same lines as in the template's scripts/slurm/train.sbatch, which explains them.
REQUEUE = """\
status=$?
[[ $status == 0 ]] || timeout 60 srun --ntasks-per-node=1 --ntasks="$SLURM_NNODES" true || sleep 600
[[ $status == 143 && ${SLURM_NTASKS:-1} == 1 ]] && status=75
if [[ $status == 75 && $(squeue -h -j "$SLURM_JOB_ID" -o %T) == RUNNING ]]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit $status"""


def check(settings: dict[str, Any]) -> None:
    """Raise a ``UserError`` if this machine cannot submit jobs with the settings of ``sweep``."""
    names = {str(key).replace("-", "_") for key in settings["sbatch"]}
    if taken := {"array", "comment", "job_name", "output"} & names:
        raise UserError(f"sweep.sbatch.{min(taken)}: the sweep sets this option. Leave it out.")
    if "clusters" in settings["sbatch"]:  # squeue would look at this machine's cluster only
        raise UserError("sweep.sbatch.clusters: submit from a machine of that cluster instead.")
    # submitit's defaults are 5 minutes, and a signal that ends a run without saving.
    for key, example in {"time": "<hours>:00:00", "signal": "USR1@300"}.items():
        if settings["sbatch"].get(key) is None:
            raise UserError(f"sweep.sbatch.{key} has no value. Add sweep.sbatch.{key}={example}")
    limit, before = settings["sbatch"]["time"], settings["sbatch"]["signal"]
    lead = re.search(r"@(\d+)$", str(before))
    if lead and (seconds := seconds_of(limit)) is not None and seconds <= int(lead[1]):
        raise UserError(
            f"sweep.sbatch.time={limit} must be longer than sweep.sbatch.signal={before}: a job "
            f"would be stopped at its start. Use sweep.sbatch.signal=USR1@{seconds // 3}"
        )
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


def seconds_of(limit: str) -> int | None:
    """Return a time limit of Slurm in seconds, or ``None`` if it is no number."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        return None
    days, *parts = (int(part or 0) for part in match.groups())
    is_minutes = match[1] is None and match[4] is None  # minutes, or minutes:seconds
    hours, minutes, seconds = (0, *parts[:2]) if is_minutes else parts
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def remove_variables() -> None:
    """Remove variables that would replace our options of sbatch and squeue.

    In a shell that is itself a Slurm job, sbatch would use the settings of that job.
    """
    for variable in filter(VARIABLES.match, list(os.environ)):
        del os.environ[variable]


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
        self.slurm_list = SlurmList(self.name, settings.get("poll_seconds", 1))
        self.polled_time = -1.0  # the time of the list in the last call of poll
        self.seen: dict[int, float] = {}  # when a job was first seen to end
        self.awaited: int | None = None  # number of the job that an sbatch may still submit
        self.num_failures = 0  # calls of sbatch in a row without an answer

    def command(self, job: Job) -> list[str]:
        """Return a job's command. The variable names its folder, and no process to follow."""
        variable = f"{parent_process.PARENT}=0:job:{job.folder}"
        # submitit's srun gives a job a terminal, in which rich would draw a bar.
        variables = ["-u", "HYDRA_FULL_ERROR", "TTY_COMPATIBLE=0", variable]
        return ["env", *variables, *self.program, *job.overrides]

    def parameters(self, job: Job) -> dict[str, Any]:
        """Return submitit's parameters for a job."""
        screen = str(job.folder / SCREEN).replace("%", "%%")  # %j would become the Slurm job's id
        given = {"comment": job.number, "output": screen} | self.settings["sbatch"]
        if given.get("requeue") is False:  # the cluster's default may be to requeue
            given["no_requeue"] = True
        options = {k: v for k, v in given.items() if v is not None and v is not False}
        return {
            "name": self.name,
            "stderr_to_stdout": True,
            "slurm_setup": self.settings.get("setup", []),
            "slurm_srun_args": ["--kill-on-bad-exit=1", "--open-mode=append", "--output", screen],
            "slurm_teardown": REQUEUE.splitlines(),
            "slurm_additional_parameters": options,
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

    def has(self, job: Job) -> bool:
        """Return whether Slurm runs a job, or has it in its queue."""
        is_known = self.cluster == "slurm" and self.slurm_list.update()
        return is_known and self.slurm_list.find(job.number)[1] not in ENDED

    def start(self, job: Job) -> str | None:
        """Submit a job, unless Slurm has it already, and return a text.

        Returns:
            ``None`` while Slurm does not answer, or while an sbatch may still submit the job.

        Raises:
            UserError: Slurm refuses the job, or has never answered.
        """
        job.folder.mkdir(exist_ok=True)
        note = job.folder / NOTE
        noted = note.read_text() if note.exists() else None
        if noted == "":  # only a new list has a job that sbatch has submitted by now
            self.slurm_list.next_time = 0.0
        if self.cluster == "slurm" and not self.slurm_list.update():
            return None
        slurm_job, state = self.slurm_list.find(job.number)
        if state not in ENDED:
            text = f"is still Slurm job {slurm_job}"
            if not noted:
                self._complete(job, slurm_job)
        elif noted == "" and (left := note.stat().st_mtime + SUBMIT_SECONDS - time.time()) > 0:
            if self.awaited != job.number:
                print_text(f"job {job.number} waits: for {left:.0f} s, sbatch may still submit it")
            self.awaited = job.number
            time.sleep(1.0)
            return None
        elif noted and _has_failed_unseen(job, note, state):
            self.running[job.number] = job, noted, -1.0
            self.polled_time = -1.0  # the next call of poll returns the job
            return f"was Slurm job {noted}"
        elif slurm_job := self._submit(job, note):
            text = f"is submitted as Slurm job {slurm_job}"
        else:
            return None
        note.write_text(slurm_job)
        self.running[job.number] = job, slurm_job, time.monotonic()
        return text

    def _call(self, job: Job) -> tuple[Any, ...]:
        """Return a call that replaces submitit's process, and so its handlers of signals."""
        command = self.command(job)
        return os.execvp, command[0], command

    def _complete(self, job: Job, slurm_job: str) -> None:
        """Write the file that a Slurm job waits for, if its driver was killed before it did so."""
        from submitit.helpers import DelayedSubmission

        file = self.scripts / f"{slurm_job}_submitted.pkl"
        if not file.exists():
            self.scripts.mkdir(exist_ok=True)
            DelayedSubmission(*self._call(job)).dump(file)

    def _submit(self, job: Job, note: Path) -> str:
        """Return the id of a new Slurm job, or ``""`` if sbatch may still submit it."""
        import submitit

        note.write_text("")
        self.awaited = None
        if provenance.read(job.folder):  # the reason for which an earlier Slurm job has ended
            provenance.note(job.folder, status=None, reason=None)
        # Ctrl-C in the terminal must not stop sbatch, which may have submitted the job already.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            executor = submitit.AutoExecutor(self.scripts, cluster=self.cluster)
            executor.update_parameters(**self.parameters(job))
            slurm_job = str(executor.submit(*self._call(job)).job_id)
        except RuntimeError as error:
            text = f"sbatch did not submit job {job.number}: {error}"
            if not UNCERTAIN.search(str(error)):
                note.unlink()
                with suppress(OSError):  # it has an earlier run
                    job.folder.rmdir()
                raise UserError(text) from error
            self.num_failures += 1
            if self.num_failures >= MAX_FAILURES:
                raise UserError(text) from error
            print_text(text)
            return ""
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.num_failures = 0
        return slurm_job

    def poll(self) -> list[Job]:
        """Return the jobs that have ended since the last call, with the reason in their folders."""
        self.slurm_list.update()
        if self.slurm_list.time == self.polled_time:
            return []
        self.polled_time = self.slurm_list.time
        is_known = [entry for entry in self.running.values() if entry[2] < self.polled_time]
        ended = [job for job, slurm_job, _ in is_known if self._has_ended(job, slurm_job)]
        for job in ended:
            del self.running[job.number]
        return ended

    def _has_ended(self, job: Job, slurm_job: str) -> bool:
        state = self.slurm_list.find(job.number)[1]
        if state not in (*ENDED, "COMPLETING"):
            self.seen.pop(job.number, None)
            return False
        if (status := job.run["status"]) in ("finished", "failed"):
            return True
        since = time.monotonic() - self.seen.setdefault(job.number, time.monotonic())
        if state == "COMPLETING" or (state == "COMPLETED" and since < FILE_SECONDS):
            return False
        if state == "FAILED":
            note_failure(job, FAILURE.format(slurm_job))
        elif status == "stopped" and state != "GONE":
            reason = f"Slurm job {slurm_job} ended as {state}: see {SCREEN}"
            provenance.note(job.folder, reason=reason)
        return True

    def stop(self, signum: int) -> bool:
        """Print that the jobs continue without the driver."""
        text = f"{signal.Signals(signum).name}: {len(self.running)} Slurm jobs continue. To cancel"
        print_text(f"{text} them, type: scancel --name={self.name}")
        return False


def _has_failed_unseen(job: Job, note: Path, state: str) -> bool:
    """Record that the noted Slurm job failed before its run began, if no driver has done so.

    If squeue has forgotten a job, its output tells that it was not cancelled before its start.
    """
    screen = job.folder / SCREEN
    has_output = screen.exists() and screen.stat().st_mtime >= note.stat().st_mtime
    has_failed = state == "FAILED" or (state == "GONE" and has_output)
    return has_failed and note_failure(job, FAILURE.format(note.read_text()))
