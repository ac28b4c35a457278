"""What a run lacks to be made again, and what is not as it was."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import code_version, record
from harness.code_version import CodeVersion
from harness.data.identity import identity_of
from harness.names import few, flat
from harness.run.code_history import FOLDER, NUM_SHOWN, history
from harness.run.provenance import PACKAGES, installed
from harness.runs.reading import RunFiles

# What of a start decides bits, and what it is called.
MACHINE = {
    "python": "Python",
    "processor": "CPU",
    "platform": "system",
    "gpus": "GPUs",
}
ARITHMETIC = {
    "torch": "torch",
    "cpu_capability": "instructions of the CPU",
    "num_threads": "threads",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "accelerator": "accelerator",
    "strategy": "strategy",
    "num_processes": "processes",
    "num_devices": "devices",
}


@dataclass
class Findings:
    """What was found, each in a line.

    Attributes:
        missing: without it, it is not made again.
        differing: with it, the result need not be the same.
    """

    missing: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)


def look(run: RunFiles, place: Path, has_environment: bool) -> Findings:
    """Compare what made a run with what is here.

    Args:
        run: to be made again.
        place: the folder that its relative paths start from.
        has_environment: whether its packages will be installed.
    """
    found, starts = Findings(), starts_of(run)
    if run.status != "finished":
        reason = f" ({run.reason})" if run.reason else ""
        found.missing.append(
            f"its end: it is {run.status}{reason}; let it finish with resume={run.folder}"
        )
    found.missing += [*_code(run), *_files(run, place)]
    if (num_nodes := starts[-1].get("num_nodes") or 1) > 1:
        found.missing.append(f"machines: it was computed on {num_nodes}, and here is one")
    if not has_environment:
        packages = [*_packages(run)]
        found.differing += [*packages, "--environment installs those of then"] if packages else []
    elif not (run.folder / PACKAGES).is_file():
        found.missing.append(f"{PACKAGES}, which older versions do not write: no --environment")
    found.differing += changes(starts[-1], record.made_by(), MACHINE)
    found.differing += _course(run, starts)
    return found


def code_of(run: RunFiles) -> CodeVersion | None:
    """What has trained all of a run; ``None`` where it was not one version, or is not there."""
    versions = history(run.folder / FOLDER)
    return code_version.load(versions[0][1]) if len(versions) == 1 else None


def starts_of(run: RunFiles) -> list[dict[str, Any]]:
    """What is known of each start; of an older run one of which nothing is."""
    return run.record.get("starts") or [{}]


def changes(before: dict[str, Any], now: dict[str, Any], names: dict[str, str]) -> list[str]:
    """Facts that are known of both and differ."""
    return [
        f"{said} {shown(before[name])} -> {shown(now[name])}"
        for name, said in names.items()
        if before.get(name) is not None and name in now and before[name] != now[name]
    ]


def shown(value: Any) -> str:
    """A fact as a person reads it."""
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _code(run: RunFiles) -> Iterator[str]:
    """What of the code is missing."""
    versions = history(run.folder / FOLDER)
    if not versions:
        commit = f"; check out {run.commit} and train with" if run.commit else "; it was made with"
        words = run.words or "no words"
        yield f"its code, of which an older version or a dry run keeps nothing{commit} {words}"
        return
    if versions[0][0] > 0:
        yield f"the code of its first {versions[0][0]} steps, which an older version has not kept"
    kept = [(step, path, code_version.load(path)) for step, path in versions]
    for _, path, code in kept:
        if code is None:
            yield f"its code: {path} is damaged; bring it back from a copy"
    whole = [(step, code) for step, _, code in kept if code is not None]
    for (_, before), (step, now) in pairwise(whole):
        changed = few(code_version.differences(before, now), NUM_SHOWN)
        yield f"one code: {changed} changed at step {step}; no single code gives this run"
    for name in whole[-1][1].sources if whole else []:
        if not name.endswith((".py", ".ipynb")):
            yield f"{name}, of which only the hash is kept: install it as a package of its own"
    if any(str(value).startswith("__main__.") for value in flat(run.config).values()):
        yield "classes of a notebook or of a script itself: put them in a module, and train again"


def _files(run: RunFiles, place: Path) -> Iterator[str]:
    """Files that the settings name, and that are gone or hold something else."""
    for key, file in run.record.get("data", {}).get("files", {}).items():
        path = place / file["path"]
        if not path.is_file():
            yield f"{key}={file['path']}: there is no {path}; bring it back"
        elif identity_of(str(path)) != file["crc32"]:
            yield f"{key}={file['path']}: {path} holds other data than then; bring them back"


def _packages(run: RunFiles) -> Iterator[str]:
    """Packages of other versions: those that the code imports, then all others."""
    code = code_of(run)
    used = {name: v for name, v in code.versions.items() if name != "Python"} if code else {}
    now = code_version.installed_versions(used)
    for name in used.keys() - now.keys():
        if names := metadata.packages_distributions().get(name):  # installed by another name
            now[name] = metadata.version(names[0])
    yield from (
        f"{name} {version} -> {now.get(name, 'not installed')}"
        for name, version in used.items()
        if now.get(name) != version
    )
    if (run.folder / PACKAGES).is_file():
        here = versions_in("".join(installed()))
        before = versions_in((run.folder / PACKAGES).read_text())
        others = [
            f"{name} {version} -> {here.get(name, 'not installed')}"
            for name, version in before.items()
            if here.get(name) != version and name not in {one.replace("_", "-") for one in used}
        ]
        if others:
            yield f"packages that it does not import itself: {few(others, NUM_SHOWN)}"


def versions_in(text: str) -> dict[str, str]:
    """The versions in lines ``name==version``."""
    lines = [line.partition("==") for line in text.splitlines()]
    return {name: version for name, _, version in lines}


def _course(run: RunFiles, starts: list[dict[str, Any]]) -> Iterator[str]:
    """What of the run's own course keeps bits from being the same."""
    for one, other in pairwise(starts):
        yield from (f"of its own starts: {text}" for text in changes(one, other, ARITHMETIC))
        if changes(one, other, {"limits": ""}):
            yield (
                "it got more epochs or steps when it went on: a schedule over the whole run was "
                "stretched, and no single run has its learning rates"
            )
    trainer = run.config.get("trainer") or {}
    if trainer.get("max_time"):
        yield f"trainer.max_time={trainer['max_time']}: a clock has ended it"
    if starts[-1].get("gpus") and not trainer.get("deterministic"):
        yield "trainer.deterministic was not true, and GPUs then need not repeat bits"
    if not starts[-1].get("host"):
        yield "how it was started, its data and its packages: an older version notes nothing"


def other_data(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Splits whose samples are others than those of the run, as far as both have noted them."""
    return [
        split
        for split in ("train", "val", "test")
        if split in before and split in now and before[split] != now[split]
    ]


def start_place(run: RunFiles) -> Path:
    """Where the run was started, if that folder is here; else the present one."""
    folder = Path(starts_of(run)[-1].get("started_in", ""))
    return folder if folder.is_absolute() and folder.is_dir() else Path.cwd()
