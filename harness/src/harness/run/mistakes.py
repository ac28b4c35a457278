"""Tell of mistakes in a run's settings, or in its owner's code, in one to three lines.

In: an exception. Out: while a run is built, a ``UserError``, which leaves no folder; later a
message with the place in the owner's file (``of_owner``), which ``command.main`` prints. A bug of
the harness keeps its traceback.
"""

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
from harness.names import did_you_mean
from harness.places import Place, Raised, definition, is_harness, raised
from harness.run import hints, log_file, optimizer_states
from harness.watch.objective import missing_score

SHOWS_TRACEBACK = "HYDRA_FULL_ERROR=1 prints the traceback."
# How Lightning names a method that is missing, or returns what it must not.
METHOD = re.compile(
    r"`(?:\w+\.)?(\w+_step|configure_optimizers|\w+_dataloader(?=\(\)|` must))(?:\(\))?`"
)
FRAMEWORKS = ("pytorch_lightning.", "torch.")  # of which a class's own file alone is an author's
WORKER = re.compile(r"in DataLoader worker process (\d+)")
# torch raises it from a signal's handler, in whichever line runs at that moment.
KILLED = re.compile(r"DataLoader worker \(pid.*killed by signal")
CLEAN_UP = "Please call `iter(combined_loader)` first"  # of Lightning, where loaders did not start


@contextmanager
def user_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Turn what Hydra, Lightning and torch say of wrong settings into a ``UserError``.

    Args:
        cfg: the run's config, to name the key of what refuses its arguments.
    """
    try:
        yield
    except InstantiationException as error:
        mistake = _not_built(error, cfg)
        raise mistake from (error if isinstance(mistake, UserError) else None)
    except MisconfigurationException as error:
        if raised(error).owners or _definition(error, _named_method(error)):
            raise
        raise UserError(missing_score(str(error)) or str(error)) from error
    except ConfigAttributeError as error:
        if raised(error).owners:
            raise
        raise UserError(
            f"The config has no {error.full_key}: another version of the harness has written it.\n"
            "Go back to that version, or use resume=null to start another run."
        ) from error
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        if cfg is not None and (message := _refused(raised(error), cfg)):
            raise UserError(message) from error
        raise


def of_owner(error: BaseException) -> str | None:
    """Tell of a mistake in the owner's code in one to three lines, and log its traceback.

    Returns:
        ``None`` if no line of the owner's is to blame.
    """
    if isinstance(error, TrainingError):
        return None
    error = _cause(error)
    found = raised(error)
    last_file = found.places[-1].file if found.places else ""
    hint = hints.hint_for(found.message)
    if last_file.endswith("multiprocessing/synchronize.py"):  # semaphores are in shared memory
        hint = hints.Hint("", hints.NO_SHARED_MEMORY)
    method = hint.method if hint else ""
    if not method and isinstance(error, (MisconfigurationException, TypeError)):
        method = _named_method(error)
    place = None
    if not KILLED.search(found.message) and not (hint and hint.mends == hints.NO_SHARED_MEMORY):
        place = found.owners or _definition(error, method) or _in_package(error, found)
    mends = hint.mends if hint else ""
    default_step = (inspect.getfile(pl.LightningModule), "predict_step")
    if not mends and default_step in [(p.file, p.function) for p in found.places]:
        mends = hints.NO_PREDICT_STEP.format(name=type(_trainer(error).lightning_module).__name__)
    if not place and not mends:
        return None
    if hint:
        found = replace(found, message=hints.shortened(found.message))
    more = [mends, hints.given(found)]
    if worker := WORKER.search(str(error)):
        more += [f"In data worker {worker[1]}; data.num_workers=0 reads in the run's own process."]
    path = log_file.write_traceback(error)
    where = f"The traceback is in {path} (HYDRA_FULL_ERROR=1 prints it)."
    return _message(place, found, " ".join(filter(None, more)), where if path else SHOWS_TRACEBACK)


def _cause(error: BaseException) -> BaseException:
    """The exception that a clean-up, of Lightning or of a killed worker's loader, has hidden."""
    hidden: BaseException | None = error
    while hidden is not None and not KILLED.search(str(hidden)):
        hidden = hidden.__context__
    if hidden is None and CLEAN_UP in str(error):
        hidden = error.__context__
    return hidden or error


def _message(place: Place | None, found: Raised, *more: str) -> str:
    first = ": ".join(filter(None, [str(place or ""), found.kind, found.message]))
    return "\n".join([first, *filter(None, more)])


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
    node: Any = dict(targets(cfg)).get(key, {})
    unknown = re.search(r"got an unexpected keyword argument '(\w+)'", found.message)
    # A class with **kwargs has passed it on.
    if unknown and unknown[1] in node and unknown[1] not in _parameters(node["_target_"]):
        hint = did_you_mean(unknown[1], {*map(str, node)} - {unknown[1]})
        return UserError(f"{key}: {node['_target_']} has no argument {unknown[1]}.{hint}")
    builders = [i for i, p in enumerate(found.places) if "hydra/_internal/instantiate" in p.file]
    inside = found.places[builders[-1] + 1 :] if builders else []
    is_refusal = isinstance(cause, (ValueError, MisconfigurationException)) and inside
    if is_refusal and linecache.getline(inside[-1].file, inside[-1].line).lstrip()[:5] == "raise":
        return UserError(f"{key}: {found.message}")
    if found.owners:
        return UserError(_message(found.owners, found, f"It was built for {key}.", SHOWS_TRACEBACK))
    if not any(is_harness(place.file) for place in inside):  # a library's class, or the call itself
        return UserError(f"{key}: {found.kind}: {found.message}")
    return cause


def _parameters(target: str) -> list[str]:
    return [*inspect.signature(get_object(target)).parameters]


def _refused(found: Raised, cfg: DictConfig) -> str | None:
    """Name what refused its arguments: a ``_partial_`` in the owner's code, or a checkpoint."""
    by = found.owners
    inside = found.places[found.places.index(by) + 1 :] if by else found.places
    for key, node in targets(cfg):
        if not node.get("_partial_"):
            continue
        called = get_object(node["_target_"])
        code = getattr(called.__init__ if inspect.isclass(called) else called, "__code__", None)
        is_inside = any(place.frame and place.frame.f_code is code for place in inside)
        signature = re.escape(getattr(called, "__qualname__", "?")) + r"(\.\w+)?\(\) "
        is_type_error = found.kind == "TypeError"
        if is_inside or (is_type_error and re.match(signature, found.message)):
            texts = [f"{name}={value}" for name, value in node.items() if isinstance(value, str)]
            texts = [text for text in texts if text[0] != "_" and is_type_error]
            note = f" ({', '.join(texts)} is text)" if texts else ""
            return f"{key}: {found.message}{note}" + (f"\nIt was called at {by}." if by else "")
    is_loading = any("connectors/checkpoint_connector" in place.file for place in found.places)
    if cfg.get("resume") is not None and by is None and is_loading:
        return optimizer_states.refusal(Path(cfg.resume), found.message.rstrip(" .") + ".")
    return None


def _named_method(error: BaseException) -> str:
    """The method that Lightning's message is about."""
    return next(iter(METHOD.findall(str(error))), "")


def _definition(error: BaseException, name: str) -> Place | None:
    """Where the owner defines a method of the module or the data, or the class that lacks it."""
    trainer = _trainer(error)
    if not name or trainer is None:
        return None
    data = trainer.datamodule
    objects = [data] if name.endswith("_dataloader") else [trainer.lightning_module, data]
    if name == hints.ITEM:
        objects = [*getattr(data, "datasets", {}).values(), data]
    for owner in objects:
        while hasattr(owner, "dataset") and not isinstance(owner, pl.LightningDataModule):
            owner = owner.dataset  # of a Subset
        if place := definition(owner, name):
            return place
    return None


def _in_package(error: BaseException, found: Raised) -> Place | None:
    """The innermost line of the public package that the module, the data or a stream come from."""
    trainer = _trainer(error)
    if trainer is None or (found.places and is_harness(found.places[-1].file)):
        return None
    folders = set()
    loaders = leaves(trainer.train_dataloader) if trainer.train_dataloader is not None else []
    streams = [loader.loader for loader in loaders if isinstance(loader, SharedStream)]
    for author in (trainer.lightning_module, trainer.datamodule, *streams):
        name = type(author).__module__
        package = sys.modules.get(name if name.startswith(FRAMEWORKS) else name.partition(".")[0])
        with suppress(TypeError):  # built in, typed into a prompt, or there is none
            path = Path(inspect.getfile(package))  # type: ignore[arg-type]  # None raises TypeError
            folders.add(path.parent if path.name == "__init__.py" else path)
    lines = [p for p in found.places if folders & {Path(p.file), *Path(p.file).parents}]
    return lines[-1] if lines and not is_harness(lines[-1].file) else None


def _trainer(error: BaseException) -> Any:
    """The Trainer that an exception has passed through, which knows the run's objects."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = (value for frame in reversed(frames) for value in frame.f_locals.values())
    return next((value for value in values if isinstance(value, pl.Trainer)), None)
