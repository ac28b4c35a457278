"""What a run stumbles over because of its settings, or of its owner's code, in a few lines."""

import inspect
import linecache
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
from hydra.errors import InstantiationException
from hydra.utils import get_object
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from harness.errors import TrainingError, UserError
from harness.run import hints, log_file
from harness.run.places import (
    Place,
    Raised,
    definition,
    is_harness,
    one_line,
    raised,
    variables,
)

SHOWS_TRACEBACK = "HYDRA_FULL_ERROR=1 prints the traceback."
# How Lightning names a method that is missing, or returns what it must not.
METHOD = re.compile(
    r"`(?:\w+\.)?(\w+_step|configure_optimizers|\w+_dataloader(?=\(\)|` must))(?:\(\))?`"
)
BUILDER = "hydra/_internal/instantiate"
WORKER = re.compile(r"in DataLoader worker process (\d+)")


@contextmanager
def user_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Turn what Hydra, Lightning and torch say of wrong settings into a ``UserError``.

    An exception that a line of the owner's code has raised while a run is built becomes one as
    well; once it is built, ``of_owner`` tells it. A bug of the harness keeps its traceback.

    Args:
        cfg: the run's config, to name the key of an optimizer that refuses its arguments.
    """
    try:
        yield
    except InstantiationException as error:
        mistake = _not_built(error)
        raise mistake from (error if isinstance(mistake, UserError) else None)
    except MisconfigurationException as error:
        if raised(error).owners or _method(error):
            raise
        raise UserError(str(error)) from error
    except (TypeError, ValueError, RuntimeError) as error:
        if cfg is not None and (message := _refused(raised(error), cfg)):
            raise UserError(message) from error
        raise


def of_owner(error: BaseException) -> str | None:
    """Tell of a mistake in the owner's code in one to three lines, and log its traceback.

    Returns:
        Nothing if no line of the owner's is to blame.
    """
    if isinstance(error, TrainingError):
        return None
    found = raised(error)
    known = [(hint, name) for text, hint, name in hints.KNOWN if re.search(text, found.message)]
    place = found.owners
    if place is None and known and known[0][1]:
        place = _method(error, known[0][1])
    if place is None and isinstance(error, (MisconfigurationException, TypeError)):
        place = _method(error)
    if place is None and not known:
        return None
    said = []
    if known:  # the rest of what torch and Lightning say is advice for their own settings
        said.append(known[0][0])
        found = replace(found, message=found.message.partition(". ")[0])
    said.append(hints.seen(found))
    if worker := WORKER.search(str(error)):
        said.append(
            f"In data worker {worker[1]}; data.num_workers=0 reads in the run's own process."
        )
    path = log_file.write_traceback(error)
    where = f"The traceback is in {path} (HYDRA_FULL_ERROR=1 prints it)."
    return _told(place, found, " ".join(filter(None, said)), where if path else SHOWS_TRACEBACK)


def at_build(error: BaseException, key: str) -> UserError | None:
    """Tell of an exception of the owner's code while the object of ``key`` is built."""
    found = raised(error)
    if found.owners is None:
        return None
    return UserError(_told(found.owners, found, f"It was built for {key}.", SHOWS_TRACEBACK))


def _told(place: Place | None, found: Raised, *more: str) -> str:
    where = f"{place}: " if place else ""
    said = f"{where}{found.kind}: {found.message}" if found.message else f"{where}{found.kind}"
    return "\n".join([said, *filter(None, more)])


def _not_built(error: InstantiationException) -> BaseException:
    """What to raise for an object of the config that could not be built."""
    cause: BaseException = error
    key = str(error).partition("full_key: ")[2].strip() or "the config"
    while isinstance(cause, InstantiationException):
        if cause.__cause__ is None:
            return UserError(" ".join(str(cause).split()))
        cause = cause.__cause__
    if isinstance(cause, UserError):
        return cause
    found = raised(cause)
    called = next((i for i, p in enumerate(reversed(found.places)) if BUILDER in p.file), 0)
    inside = found.places[len(found.places) - called :]
    on_purpose = isinstance(cause, (ValueError, MisconfigurationException)) and inside
    if on_purpose and linecache.getline(inside[-1].file, inside[-1].line).lstrip()[:5] == "raise":
        return UserError(f"{key}: {one_line(str(cause))}")
    if mistake := at_build(cause, key):
        return mistake
    if not any(is_harness(place.file) for place in inside):  # a library's class, or the call itself
        return UserError(f"{key}: {found.kind}: {found.message}")
    return cause


def _refused(found: Raised, cfg: DictConfig) -> str | None:
    """Name the key of a ``_partial_`` whose call, in the owner's code, refused its arguments."""
    by = found.owners
    inside = found.places[found.places.index(by) + 1 :] if by else found.places
    for key, node in _partials(cfg, ""):
        called = get_object(node["_target_"])
        code = getattr(called.__init__, "__code__", None) if inspect.isclass(called) else None
        lines = {line for *_, line in code.co_lines()} if code else set()
        is_inside = any(p.file == code.co_filename and p.line in lines for p in inside if code)
        signature = re.escape(getattr(called, "__qualname__", "?")) + r"(\.\w+)?\(\) "
        if is_inside or (found.kind == "TypeError" and re.match(signature, found.message)):
            texts = [f"{name}={value}" for name, value in node.items() if isinstance(value, str)]
            texts = [text for text in texts if text[0] != "_" and found.kind == "TypeError"]
            note = f" ({', '.join(texts)} is text)" if texts else ""
            return f"{key}: {found.message}{note}" + (f"\nIt was called at {by}." if by else "")
    return None


def _partials(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if OmegaConf.is_list(node):
        for i, child in enumerate(node):
            yield from _partials(child, f"{key}[{i}]")
    elif OmegaConf.is_dict(node):
        if node.get("_partial_") and "_target_" in node:
            yield key, node
        for name, child in node.items():
            yield from _partials(child, f"{key}.{name}" if key else str(name))


def _method(error: BaseException, name: str | None = None) -> Place | None:
    """Where the owner defines a method, or else the class that lacks it.

    Args:
        error: raised inside of the Trainer, which knows the owner's objects.
        name: of the method; by default the one that the message is about.
    """
    if name is None:
        names = METHOD.findall(str(error))
        name = names[0] if names else None
    trainers = [
        value
        for _, names in variables(raised(error, in_words=False).places)
        for value in names.values()
        if isinstance(value, pl.Trainer)
    ]
    if name is None or not trainers:
        return None
    trainer: Any = trainers[0]
    data = trainer.datamodule
    objects = [data] if name.endswith("_dataloader") else [trainer.lightning_module, data]
    if name == "__getitem__":
        objects = [*getattr(data, "datasets", {}).values(), data]
    for owner in objects:
        while hasattr(owner, "dataset") and not isinstance(owner, pl.LightningDataModule):
            owner = owner.dataset  # of a Subset
        if place := definition(owner, name):
            return place
    return None
