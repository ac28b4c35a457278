"""What a run stumbles over because of its settings, or of its owner's code, in a few lines."""

import difflib
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.errors import InstantiationException
from hydra.utils import get_object
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError

from harness.allowed import targets
from harness.data.loaders import leaves
from harness.data.streams import SharedStream
from harness.errors import TrainingError, UserError
from harness.places import Place, Raised, definition, is_harness, raised
from harness.run import hints, log_file, optimizer_states

SHOWS_TRACEBACK = "HYDRA_FULL_ERROR=1 prints the traceback."
# How Lightning names a method that is missing, or returns what it must not.
METHOD = re.compile(
    r"`(?:\w+\.)?(\w+_step|configure_optimizers|\w+_dataloader(?=\(\)|` must))(?:\(\))?`"
)
LOADER = "connectors/checkpoint_connector"
BUILDER = "hydra/_internal/instantiate"
FRAMEWORK = ("pytorch_lightning.", "torch.")  # whose modules' own files alone are an author's
# What Lightning raises, while it cleans up, where loaders could not start.
MASKING = "Please call `iter(combined_loader)` first"
SEMAPHORES = "multiprocessing/synchronize.py"
WORKER = re.compile(r"in DataLoader worker process (\d+)")
# torch raises it from a signal's handler, in whichever line runs at that moment.
KILLED = re.compile(r"DataLoader worker \(pid.*killed by signal")


@contextmanager
def user_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Turn what Hydra, Lightning and torch say of wrong settings into a ``UserError``.

    An exception that a line of the owner's code has raised while a run is built becomes one as
    well; once it is built, ``of_owner`` tells it. A bug of the harness keeps its traceback.

    Args:
        cfg: the run's config, to name the key of what refuses its arguments.
    """
    try:
        yield
    except InstantiationException as error:
        mistake = _not_built(error, cfg)
        raise mistake from (error if isinstance(mistake, UserError) else None)
    except MisconfigurationException as error:
        if raised(error).owners or _method(error, _named(error)):
            raise
        raise UserError(str(error)) from error
    except ConfigAttributeError as error:
        if raised(error).owners:
            raise
        raise UserError(
            f"The config has no {error.full_key}: another version of the harness has written it.\n"
            "Go back to that version, or use resume=null to start another run."
        ) from error
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        found = raised(error)
        if cfg is not None and (message := _refused(found, cfg) or _not_loaded(found, cfg)):
            raise UserError(message) from error
        raise


def of_owner(error: BaseException) -> str | None:
    """Tell of a mistake in the owner's code in one to three lines, and log its traceback.

    Returns:
        Nothing if no line of the owner's is to blame.
    """
    if isinstance(error, TrainingError):
        return None
    if MASKING in str(error) and error.__context__ is not None:
        error = error.__context__
    error = _end_of_worker(error) or error
    found, hint, method = raised(error), "", ""
    # The system keeps semaphores in shared memory.
    is_semaphore = bool(found.places) and found.places[-1].file.endswith(SEMAPHORES)
    if is_semaphore:
        hint = hints.NO_SHARED_MEMORY
    for known, texts in hints.KNOWN.items():
        for text in texts:
            if not hint and re.search(text, found.message):
                hint, method = texts[text], known
    if not method and isinstance(error, (MisconfigurationException, TypeError)):
        method = _named(error)
    place = None
    if not is_semaphore and not KILLED.search(found.message):
        place = found.owners or _method(error, method) or _of_package(error, found)
    if not place and not hint:
        return None
    if hint:
        found = replace(found, message=hints.brief(found.message))
    said = [hint, hints.seen(found)]
    if worker := WORKER.search(str(error)):
        said.append(
            f"In data worker {worker[1]}; data.num_workers=0 reads in the run's own process."
        )
    path = log_file.write_traceback(error)
    where = f"The traceback is in {path} (HYDRA_FULL_ERROR=1 prints it)."
    return _told(place, found, " ".join(filter(None, said)), where if path else SHOWS_TRACEBACK)


def _end_of_worker(error: BaseException | None) -> BaseException | None:
    """What torch raised of a data worker that was killed, also where its clean-up failed then.

    Killed while the loader still started its threads, it leaves some that cannot be joined.
    """
    while error is not None and not KILLED.search(str(error)):
        error = error.__context__
    return error


def _told(place: Place | None, found: Raised, *more: str) -> str:
    said = ": ".join(filter(None, [str(place or ""), found.kind, found.message]))
    return "\n".join([said, *filter(None, more)])


def _not_built(error: InstantiationException, cfg: DictConfig | None) -> BaseException:
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
    if unknown := _unknown_argument(key, found.message, cfg):
        return UserError(unknown)
    called = next((i for i, p in enumerate(reversed(found.places)) if BUILDER in p.file), 0)
    inside = found.places[len(found.places) - called :]
    on_purpose = isinstance(cause, (ValueError, MisconfigurationException)) and inside
    if on_purpose and linecache.getline(inside[-1].file, inside[-1].line).lstrip()[:5] == "raise":
        return UserError(f"{key}: {found.message}")
    if found.owners:
        return UserError(_told(found.owners, found, f"It was built for {key}.", SHOWS_TRACEBACK))
    if not any(is_harness(place.file) for place in inside):  # a library's class, or the call itself
        return UserError(f"{key}: {found.kind}: {found.message}")
    return cause


def _unknown_argument(key: str, message: str, cfg: DictConfig | None) -> str | None:
    """Name a setting that a class with ``**kwargs`` has passed on to one that does not take it."""
    said = re.search(r"got an unexpected keyword argument '(\w+)'", message)
    node = dict(targets(cfg)).get(key) if said else None
    if not said or node is None or said[1] not in node:
        return None
    if said[1] in inspect.signature(get_object(node["_target_"])).parameters:
        return None  # A mistake inside of the class.
    close = difflib.get_close_matches(said[1], {*map(str, node)} - {said[1]}, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{key}: {node['_target_']} has no argument {said[1]}.{hint}"


def _refused(found: Raised, cfg: DictConfig) -> str | None:
    """Name the key of a ``_partial_`` whose call, in the owner's code, refused its arguments."""
    by = found.owners
    inside = found.places[found.places.index(by) + 1 :] if by else found.places
    for key, node in targets(cfg):
        if not node.get("_partial_"):
            continue
        called = get_object(node["_target_"])
        code = getattr(called.__init__ if inspect.isclass(called) else called, "__code__", None)
        is_inside = any(place.frame and place.frame.f_code is code for place in inside)
        signature = re.escape(getattr(called, "__qualname__", "?")) + r"(\.\w+)?\(\) "
        if is_inside or (found.kind == "TypeError" and re.match(signature, found.message)):
            texts = [f"{name}={value}" for name, value in node.items() if isinstance(value, str)]
            texts = [text for text in texts if text[0] != "_" and found.kind == "TypeError"]
            note = f" ({', '.join(texts)} is text)" if texts else ""
            return f"{key}: {found.message}{note}" + (f"\nIt was called at {by}." if by else "")
    return None


def _not_loaded(found: Raised, cfg: DictConfig) -> str | None:
    """Name the checkpoint of a run that goes on, where Lightning or torch refuse what it holds."""
    is_loader = any(LOADER in place.file for place in found.places)
    if cfg.get("resume") is None or found.owners or not is_loader:
        return None
    return optimizer_states.refusal(Path(cfg.resume), found.message.rstrip(" .") + ".")


def _named(error: BaseException) -> str:
    """The method that Lightning's message is about."""
    return next(iter(METHOD.findall(str(error))), "")


def _method(error: BaseException, name: str) -> Place | None:
    """Where the owner defines a method, or else the class that lacks it.

    Args:
        error: raised inside of the Trainer, which knows the owner's objects.
        name: of the method; without one there is nothing to find.
    """
    trainer = _trainer(error)
    if not name or trainer is None:
        return None
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


def _of_package(error: BaseException, found: Raised) -> Place | None:
    """The innermost line of the package that the module, the data or a stream come from.

    Who trains a public package's module has written none of it, and reads no traceback of it.
    """
    trainer = _trainer(error)
    if trainer is None or (found.places and is_harness(found.places[-1].file)):
        return None
    places = set()
    loaders = leaves(trainer.train_dataloader) if trainer.train_dataloader is not None else []
    streams = [loader.loader for loader in loaders if isinstance(loader, SharedStream)]
    for author in (trainer.lightning_module, trainer.datamodule, *streams):
        name = type(author).__module__
        package = sys.modules.get(name if name.startswith(FRAMEWORK) else name.partition(".")[0])
        with suppress(TypeError):  # built in, typed into a prompt, or there is none
            path = Path(inspect.getfile(package))  # type: ignore[arg-type]  # None raises TypeError
            places.add(path.parent if path.name == "__init__.py" else path)
    theirs = [p for p in found.places if places & {Path(p.file), *Path(p.file).parents}]
    return theirs[-1] if theirs and not is_harness(theirs[-1].file) else None


def _trainer(error: BaseException) -> Any:
    """The Trainer that an exception has passed through, which knows the run's objects."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = (value for frame in reversed(frames) for value in frame.f_locals.values())
    return next((value for value in values if isinstance(value, pl.Trainer)), None)
