"""Train a kind of module or loader under a strategy, and judge what comes of it."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from harness.checkpoints.lookup import by_step, link_newest
from tests.faults.run_folder import contents, differences
from tests.loaders import libraries, zoo
from tests.modules.kinds import KINDS, OF_PARITY, Kind
from tests.strategy_runs import SAME, STRATEGIES, TIMED_OUT, distances, execute, outcome, write_conf

PACKAGE = "tests.modules"
GROUPS: dict[str, Sequence[str]] = {
    "module": [*KINDS],
    "parity": [*OF_PARITY],
    "loader": zoo.KINDS,
}
RESUMED = ", resumed"  # behind the strategy
CHECKPOINTS = ("checkpoint.every_n_steps=1", "checkpoint.num_kept=1000")
RESUMED_AT = 7  # in the middle of the second epoch
BARE = ("Traceback (most recent call last)", "terminate called")  # nothing that a user can read
# Sentences by which a run tells that its result is not that of one process.
DIFFERENT = (
    "does not train alike",
    "is not the same for every part of a batch",
    "over the parts of a batch is not its value for the whole batch",
    "evaluates with state that each rank has built from its own samples",
    "evaluates a batch with state from earlier batches",
    "BatchNorm sees only the local batch",
    "draws random numbers in its steps",
)
# And those by which it says that it may be another one.
TELLING = (
    *DIFFERENT,
    "other samples than with one process",
    "The run did not check whether",
    "is written by each process from its own samples",
    "draws other batches than before",
    "differs between ranks",
)


# Kinds whose reference accumulates batches as well.
ACCUMULATED = ("and without:", "when batches are accumulated", "each accumulated batch draws")


@dataclass(frozen=True)
class End:
    """How a run has ended."""

    status: int  # of its command
    said: str  # on both streams
    values: dict[str, Any] = field(default_factory=dict)  # the weights and values it has come to
    settings: Sequence[str] = ()  # of the kind that had to be typed
    reference: dict[str, Any] | None = None  # what the values must be, if not one process's
    is_other: bool = False  # what it has written differs in another way


@dataclass(frozen=True)
class Cell:
    """The verdict on a kind under a strategy.

    It is ``equal`` to one process (1e-9), ``set`` if it needs settings that a refusal has named,
    ``told`` if a warning reports a difference, ``refused`` with an error, ``silent`` if it differs
    without one, ``false alarm`` if it is equal despite a warning; ``broken`` with a traceback,
    or if it hangs.
    """

    verdict: str
    said: str  # by the command
    difference: float = 0.0  # the largest of a weight or value

    @property
    def far(self) -> str:
        """The difference, where there should be none."""
        return f"{self.difference:.0e}" if self.verdict in ("told", "silent") else ""

    @property
    def says(self) -> str:
        """The sentence that refuses or tells, or its beginning."""
        if self.verdict in ("told", "false alarm"):
            return next(text for text in TELLING if is_said(text, self.said))
        last = self.said.strip().split("\n\n")[-1]
        return last[:100] if self.verdict in ("refused", "broken") else ""


def strategies_of(group: str) -> list[str]:
    """Return the strategies under which a group is judged."""
    return ["ddp(2)", "dp(2)"] if group == "parity" else [*STRATEGIES]


def row(group: str, kind: str, strategies: Sequence[str]) -> dict[str, Cell]:
    """Judge a kind under some strategies; a loader also where its run is resumed."""

    @cache
    def of_one_process() -> dict[str, Any]:
        return next(_ends(group, kind, "cpu"))[1].values

    found = {}
    for strategy in strategies:
        for name, end in _ends(group, kind, strategy):
            found[name] = judge(end, of_one_process)
    return found


def judge(end: End, of_one_process: Any) -> Cell:
    """Say what a run's end means."""
    if end.status == TIMED_OUT or any(text in end.said for text in BARE):
        return Cell("broken", end.said)
    if end.status:
        return Cell("refused", end.said)
    reference = of_one_process() if end.reference is None else end.reference
    apart = max(distances(end.values, reference).values())
    if apart <= SAME and not end.is_other:
        # The reference accumulates as well, so it cannot show that accumulating is different.
        is_judged = end.reference is None and not any(
            is_said(text, end.said) for text in ACCUMULATED
        )
        is_told = is_judged and any(is_said(text, end.said) for text in DIFFERENT)
        verdict = "false alarm" if is_told else "set" if end.settings else "equal"
        return Cell(verdict, end.said, apart)
    is_told = any(is_said(text, end.said) for text in TELLING)
    return Cell("told" if is_told else "silent", end.said, apart)


def is_said(sentence: str, said: str) -> bool:
    """Whether a run has said a sentence, in lines of any width."""
    return "".join(sentence.split()) in "".join(said.split())


def _ends(group: str, kind: str, strategy: str) -> Iterator[tuple[str, End]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        run = partial(execute, strategy=strategy, folder=Path(name))
        if group != "loader":
            yield strategy, _module_end((KINDS | OF_PARITY)[kind], Path(name), run)
        else:
            yield from _loader_ends(kind, strategy, Path(name), run)


def _module_end(kind: Kind, folder: Path, run: Any) -> End:
    """Train a module; again with those of its settings that a refusal names."""
    data = f"_target_: {PACKAGE}.data.{kind.data}\ndataset: {kind.dataset}\n"
    words = write_conf(folder, data=data, model=f"_target_: {PACKAGE}.{kind.model}\n")
    settings: list[str] = []
    while True:
        name = f"run_{len(settings)}"
        status, said = run([*words, *kind.words, f"name={name}", *settings])
        if status == 0:
            (run_dir,) = (folder / name).iterdir()
            return End(status, said, outcome(run_dir), settings)
        named = [s for s in kind.settings if s.partition("=")[0] in said and s not in settings]
        if not named:
            return End(status, said)
        settings += named


def settings_of(kind: Kind, strategy: str) -> list[str]:
    """Return the settings of a kind that a strategy takes, as a user who was refused has typed."""
    return [s for s in kind.settings if ("find_unused" in s) == strategy.startswith("ddp")]


def _loader_ends(kind: str, strategy: str, folder: Path, run: Any) -> Iterator[tuple[str, End]]:
    """Train with a loader, and resume in the middle of its second epoch."""
    status, said = run([*loader_words(kind, folder), "name=whole"])
    if status:
        yield strategy, End(status, said)
        return
    (whole,) = (folder / "whole").iterdir()
    values = outcome(whole)
    yield strategy, End(status, said, values)
    shutil.copytree(whole, folder / "reference", symlinks=True)
    steps = by_step(whole / "checkpoints")
    for path in steps[RESUMED_AT:]:
        path.unlink()
    link_newest(steps[RESUMED_AT - 1])
    (whole / "results.json").unlink()
    status, said = run([f"resume={whole}", *CHECKPOINTS])
    name = strategy + RESUMED
    if status:
        yield name, End(status, said)
        return
    # A new start may change the order in which three processes are added up.
    is_other = strategy != "ddp(3)" and bool(
        differences(contents(folder / "reference"), contents(whole))
    )
    yield name, End(status, said, outcome(whole), (), values, is_other)


def loader_words(name: str, folder: Path) -> list[str]:
    """Write a user's YAML files; return the overrides that select them."""
    kind, _, num_workers = name.partition(", workers=")
    owned = {"overridden": "Overridden", "streams of a DataModule": "OfStreams"}
    modules = {"of the module": "WithLoaders", "moved at random": "MovedAtRandom"}
    data = f"_target_: {zoo.__name__}.{owned.get(kind, 'Data')}\n"
    data += "batch_size: 8\n" if kind in owned else f"kind: {kind}\n"
    if kind in libraries.RECIPES:
        data = f"_target_: {libraries.__name__}.recipe\nname: {kind}\n"
    data += f"num_workers: {num_workers or 0}\n"
    model = f"_target_: {zoo.__name__}.{modules.get(kind, 'Module')}\n"
    mine = write_conf(folder, data=data, model=model)
    extra = ["trainer.limit_train_batches=5"] if kind == "endless" else []
    extra += ["data=null"] if kind == "of the module" else []
    return [*mine, *CHECKPOINTS, *extra]
