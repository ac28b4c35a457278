"""Stop runs in every way, and see whether anything is lost: the figures of docs/reliability.md.

python -m tests_harness.faults                        all faults, about half an hour on two cores
python -m tests_harness.faults sweep --only EMA       resume from every step of one configuration
python -m tests_harness.faults kill storm --num 10    a few of both
python -m tests_harness.faults modules --num 100      real modules, a few kills of each
"""

import argparse
import random
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from tests_harness import figures
from tests_harness.faults import (
    damage,
    full_disk,
    kills,
    module_kills,
    real_modules,
    resume_sweep,
    signals,
    writes,
)
from tests_harness.figures import Rows


def sweep(folder: Path, options: argparse.Namespace) -> Rows:
    rows = {}
    good = total = 0
    names = [*resume_sweep.CONFIGURATIONS, *resume_sweep.DATA]
    for name in names:
        if options.only in name:
            data = folder.with_name("data")
            run = resume_sweep.words_on(name, data) if name in resume_sweep.DATA else name
            found = dict(resume_sweep.sweep(run, folder))
            equal = sum(not differences for differences in found.values())
            good, total = good + equal, total + len(found)
            for step, differences in found.items():
                if differences:
                    rows[f"  {name}, {step}"] = (False, str(differences[:4]))
            print(f"  {name}: {equal} of {len(found)}", flush=True)
    fault = f"resume from every step, {len(names)} configurations"
    rows[fault] = (good == total, f"{good} of {total} equal by bit")
    return rows


def kill(folder: Path, options: argparse.Namespace) -> Rows:
    rows = {}
    for num_processes in (1, 2):
        trials = kills.kills(folder, num_processes, options.num, options.seed)
        faults = sum(len(trial.faults) for trial in trials)
        equal = sum(not trial.differences for trial in trials)
        hangs = sum(trial.hangs for trial in trials)
        rows[f"kill -9 at random moments, {num_processes} processes"] = (
            equal == len(trials) and hangs == 0,
            f"{faults} kills of {len(trials)} runs, {equal} runs equal by bit, {hangs} hangs",
        )
    return rows


def storm(folder: Path, options: argparse.Namespace) -> Rows:
    rows = {}
    # AdamW turns the rounding of a gradient that is nearly zero into a step: of three processes,
    # one weight is 1.3e-6 off without any fault. In double precision nothing hides behind that.
    for most_processes, precision, bar in ((2, "32-true", 1e-6), (3, "64-true", 1e-12)):
        trials = kills.storms(folder, options.num, options.seed, most_processes, precision)
        faults = sum(len(trial.faults) for trial in trials)
        worst = max(trial.max_weight_difference for trial in trials)
        hangs = sum(trial.hangs for trial in trials)
        rows[f"storms: 1 to {most_processes} processes, any signal, any victim, {precision}"] = (
            worst <= bar and hangs == 0,
            f"{faults} faults of {len(trials)} runs, largest weight difference {worst:.1e}, "
            f"{hangs} hangs",
        )
    return rows


def write(folder: Path, options: argparse.Namespace) -> Rows:
    rows = {}
    for where, tmpdir in (("", None), (", TMPDIR on another file system", "/dev/shm")):
        unusable = writes.kill_while_writing(folder, 2 * options.num, options.seed, tmpdir)
        rows[f"kill -9 while a checkpoint is written{where}"] = (
            unusable == 0,
            f"{unusable} of {2 * options.num} unusable",
        )
    return rows


def damaged(folder: Path, options: argparse.Namespace) -> Rows:
    kills.finish(folder, 1)
    checkpoints = kills.run_dir(folder) / "checkpoints"
    failed = [
        name
        for i in range(options.num)
        for name in damage.not_rejected(checkpoints, options.seed + i)
    ]
    kinds = len(damage.damages(1 << 20, random.Random(0)))
    total = kinds * options.num
    return {
        f"damaged newest checkpoint, {kinds} kinds": (
            not failed,
            f"{total - len(failed)} of {total} rejected, the one before taken {failed or ''}",
        )
    }


def asked(folder: Path, options: argparse.Namespace) -> Rows:
    cases = [
        (strategy, num_workers, victim, signum)
        for strategy, num_processes in signals.STRATEGIES.items()
        for num_workers in (0, 2)
        for victim in ["group", *range(num_processes)]
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    ]
    random.Random(options.seed).shuffle(cases)
    cases = cases[: 2 * options.num]
    slowest, bad = 0.0, []
    for strategy, num_workers, victim, signum in cases:
        outcome = signals.hit(folder, strategy, signum, victim, num_workers)
        is_good = outcome.is_good(options.finish_seconds)
        slowest = max(slowest, outcome.seconds)
        if not is_good or outcome.status != 128 + signum:
            bad.append((strategy, num_workers, victim, signum.name, outcome.status))
    rows = {}
    for moment in ("validation", "test"):
        cases_there = [
            (strategy, victim)
            for strategy, num_processes in signals.STRATEGIES.items()
            for victim in ["group", *range(num_processes)]
        ]
        random.Random(options.seed).shuffle(cases_there)
        cases_there = cases_there[: max(2, options.num // 5)]
        failed, longest = [], 0.0
        for strategy, victim in cases_there:
            outcome = signals.hit(folder, strategy, signal.SIGTERM, victim, moment=moment)
            longest = max(longest, outcome.seconds)
            is_good = outcome.is_good(options.finish_seconds)
            if not is_good or outcome.status != 128 + signal.SIGTERM:
                failed.append((strategy, victim, outcome.status, f"{outcome.seconds:.1f} s"))
        rows[f"SIGTERM in the middle of a {moment} of {signals.SLOW_SECONDS} s"] = (
            not failed,
            f"{len(cases_there) - len(failed)} of {len(cases_there)} left with the step before it "
            f"saved, status 143, nobody left, slowest {longest:.1f} s {failed or ''}",
        )
    twice = signals.hit(folder, "ddp", signal.SIGINT, "group", 2, twice=True)
    return rows | {
        "Ctrl-C twice": (
            twice.status == 130 and twice.is_gone,
            f"status {twice.status}, nobody left, {twice.seconds:.1f} s",
        ),
        "SIGTERM, SIGINT, SIGUSR1, SIGUSR2 to the group or a rank; cpu, dp, ddp, ddp2; "
        "0 or 2 workers": (
            not bad,
            f"{len(cases) - len(bad)} of {len(cases)} saved, status 128+n, nobody left, "
            f"slowest {slowest:.1f} s {bad or ''}",
        ),
    }


def dead(folder: Path, options: argparse.Namespace) -> Rows:
    good, slowest, cases = 0, 0.0, 0
    for num_workers in (0, 2):
        for victim in (0, 1):
            for _ in range(max(1, options.num // 10)):
                outcome = signals.hit(folder, "ddp", signal.SIGKILL, victim, num_workers)
                named = f"The process of rank {victim} has ended" in outcome.log
                cases, good = cases + 1, good + (named and outcome.is_gone)
                slowest = max(slowest, outcome.seconds)
    return {
        "kill -9 of one of two ranks": (
            good == cases,
            f"{good} of {cases} named, nobody left, slowest {slowest:.1f} s",
        )
    }


def disk(folder: Path, options: argparse.Namespace) -> Rows:
    rows = {}
    for choice, expected in (("continue", 0), ("stop", 1)):
        status, log, stands, finished = full_disk.run_into_full_disk(folder / "disk", choice)
        said = "was not written: No space left on device" in log
        good = status == expected and said and stands and finished
        rows[f"full disk, on_full_disk={choice}"] = (
            good,
            f"status {status}, said so, the last checkpoint stands, finished when there is room",
        )
    return rows


def modules(folder: Path, options: argparse.Namespace) -> Rows:
    names = [name for name in real_modules.CONFIGURATIONS if options.only in name]
    rows: Rows = {}
    all_: list[module_kills.Outcome] = []
    for i, name in enumerate(names):
        # As evenly as the number of kills can be shared, and never none.
        num = max(1, options.num * (i + 1) // len(names) - options.num * i // len(names))
        outcome = module_kills.storm(name, folder, random.Random(f"{options.seed} {name}"), num)
        all_.append(outcome)
        said = (
            f"{len(outcome.faults)} kills of {outcome.num_runs} runs: {outcome.num_equal} equal by "
            f"bit, {outcome.num_told} told, {outcome.num_silent} silently different, "
            f"{outcome.num_hangs} hangs"
        )
        wrong = [*outcome.differences, *outcome.failures]
        print(f"  {name}: {said}", *wrong, sep="\n    ", flush=True)
        if wrong or outcome.num_hangs:
            rows[f"  {name}"] = (False, said)
    runs = sum(one.num_runs for one in all_)
    rows[f"kill -9 and SIGTERM of all, a rank or a data worker; {len(names)} real modules"] = (
        not rows,
        f"{sum(len(one.faults) for one in all_)} kills of {runs} runs: "
        f"{sum(one.num_equal for one in all_)} equal by bit, "
        f"{sum(one.num_told for one in all_)} told, "
        f"{sum(one.num_silent for one in all_)} silently different, "
        f"{sum(one.num_hangs for one in all_)} hangs",
    )
    return rows


def chains(folder: Path, options: argparse.Namespace) -> Rows:
    names = [name for name in real_modules.CHAINED if options.only in name]
    found = {
        name: module_kills.chain(name, folder, random.Random(f"{options.seed} {name}"))
        for name in names
    }
    worst = max(difference for difference, _ in found.values())
    wrong = {name: text for name, (_, text) in found.items() if text}
    return {
        f"2, then 3, 1 and 3 processes, killed between, 64-true; {len(names)} real modules": (
            worst <= 1e-12,
            f"largest weight difference from one process {worst:.1e} {wrong or ''}",
        )
    }


FAULTS: dict[str, Callable[[Path, argparse.Namespace], Rows]] = {
    "sweep": sweep,
    "kill": kill,
    "storm": storm,
    "modules": modules,
    "chains": chains,
    "write": write,
    "damage": damaged,
    "signal": asked,
    "dead": dead,
    "disk": disk,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", metavar="fault", help=", ".join(FAULTS))
    parser.add_argument("--num", type=int, default=50, help="how many of the random ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--finish-seconds", type=float, default=10, help="that a stopped run has to leave"
    )  # schedulers leave 10 at least
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.faults) - FAULTS.keys():
        parser.error(f"unknown: {', '.join(unknown)}. Choose from {', '.join(FAULTS)}.")
    torch.set_num_threads(1)  # a fork has no other threads, and would wait for them
    # The sweep trains in this process, whose threads a fork would lack: the others come before.
    names = sorted(arguments.faults or FAULTS, key="sweep".__eq__)
    figures.show(
        "fault", names, lambda name, to: FAULTS[name](to / name, arguments), arguments.json
    )


if __name__ == "__main__":
    main()
