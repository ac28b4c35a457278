"""Show mistakes in a run's settings, or in its user's code, in one to three lines.

In: an exception. Out: while a run is built, a ``UserError``, which leaves no folder; later a
message with the line of the user's code and a hint, which ``command.main`` prints. A bug of the
harness keeps its traceback.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hydra.errors import InstantiationException
from hydra.utils import get_object
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError

from harness.allowed import targets
from harness.errors import TrainingError, UserError
from harness.names import did_you_mean
from harness.run import log_file
from harness.run.hints import SHARED_MEMORY, WORKER_KILLED, given, hint_for, short_message
from harness.run.optimizer_states import refusal
from harness.run.stack import CodeLine, ErrorInfo, read_error
from harness.watch.objective import missing_score

SHOWS_TRACEBACK = "HYDRA_FULL_ERROR=1 prints the traceback."
IN_WORKER = re.compile(r"in DataLoader worker process (\d+)")
CLEAN_UP = "Please call `iter(combined_loader)` first"  # of Lightning, if loaders did not start


@contextmanager
def user_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Turn errors of Hydra, Lightning and torch about wrong settings into a ``UserError``.

    Args:
        cfg: the run's config, for the key of an object that refuses its arguments.
    """
    try:
        yield
    except InstantiationException as error:
        mistake = _not_built(error, cfg)
        raise mistake from (error if isinstance(mistake, UserError) else None)
    except MisconfigurationException as error:
        if read_error(error).user_line:
            raise
        raise UserError(missing_score(str(error)) or str(error)) from error
    except ConfigAttributeError as error:
        if read_error(error).user_line:
            raise
        raise UserError(
            f"The config has no {error.full_key}: another version of the harness has written it.\n"
            "Go back to that version, or use resume=null to start another run."
        ) from error
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        if cfg is not None and (message := _refused(read_error(error), cfg)):
            raise UserError(message) from error
        raise


def of_user(error: BaseException) -> str | None:
    """Describe a mistake in the user's code in one to three lines, and log its traceback.

    Returns:
        ``None`` if no line of the user's is to blame, and there is no hint.
    """
    if isinstance(error, TrainingError):
        return None
    error = _cause(error)
    info = read_error(error)
    hint = hint_for(info)
    # These are raised in whichever line runs, and a worker's end is no line's mistake.
    is_nobodys = re.search(f"{SHARED_MEMORY}|{WORKER_KILLED}", info.message)
    line = None if is_nobodys else info.user_line
    if not line and not hint:
        return None
    if hint:
        info = replace(info, message=short_message(info.message))
    more = [hint, "" if is_nobodys else given(info)]
    if worker := IN_WORKER.search(str(error)):
        more += [f"In data worker {worker[1]}; data.num_workers=0 reads in the run's own process."]
    path = log_file.write_traceback(error)
    where = f"The traceback is in {path} (HYDRA_FULL_ERROR=1 prints it)."
    texts = [_first(line, info), " ".join(filter(None, more)), where if path else SHOWS_TRACEBACK]
    return "\n".join(filter(None, texts))


def _first(line: CodeLine | None, info: ErrorInfo) -> str:
    return ": ".join(filter(None, [str(line or ""), info.kind, info.message]))


def _cause(error: BaseException) -> BaseException:
    """Return the exception that a clean-up, of Lightning or of a loader's threads, has hidden."""
    hidden: BaseException | None = error
    while hidden is not None and not re.search(WORKER_KILLED, str(hidden)):
        hidden = hidden.__context__
    if hidden is None and CLEAN_UP in str(error):
        hidden = error.__context__
    return hidden or error


def _not_built(error: InstantiationException, cfg: DictConfig | None) -> BaseException:
    """Return what to raise for an object of the config that could not be built."""
    cause: BaseException = error
    key = str(error).partition("full_key: ")[2].strip() or "the config"
    while isinstance(cause, InstantiationException):
        if cause.__cause__ is None:
            return UserError(" ".join(str(cause).split()))
        cause = cause.__cause__
    if isinstance(cause, UserError):
        return cause
    info = read_error(cause)
    node = dict(targets(cfg)).get(key, {})
    unknown = re.search(r"got an unexpected keyword argument '(\w+)'", info.message)
    if unknown and unknown[1] in node:  # a class with **kwargs has passed it on
        hint = did_you_mean(unknown[1], {*map(str, node)} - {unknown[1]})
        return UserError(f"{key}: {node['_target_']} has no argument {unknown[1]}.{hint}")
    if info.user_line:
        first = _first(info.user_line, info)
        return UserError(f"{first}\nIt was built for {key}. {SHOWS_TRACEBACK}")
    builders = [i for i, x in enumerate(info.lines) if "hydra/_internal/instantiate" in x.file]
    is_ours = any(x.is_harness for x in info.lines[max([0, *builders]) :])
    if is_ours and not isinstance(cause, (ValueError, MisconfigurationException)):
        return cause  # a bug of the harness
    return UserError(f"{key}: {info.kind}: {info.message}")


def _refused(info: ErrorInfo, cfg: DictConfig) -> str | None:
    """Name what refused its arguments when it was called: a ``_partial_``, or a checkpoint."""
    frames = [line.frame.f_code for line in info.lines if line.frame]
    for key, node in targets(cfg):
        called = get_object(node["_target_"]) if node.get("_partial_") else None
        code = getattr(called.__init__ if inspect.isclass(called) else called, "__code__", None)
        if code is not None and code in frames:
            texts = [f"{k}={v}" for k, v in node.items() if isinstance(v, str) and k[0] != "_"]
            note = f" ({', '.join(texts)} is text)" if texts and info.kind == "TypeError" else ""
            where = f"\nIt was called at {info.user_line}." if info.user_line else ""
            return f"{key}: {info.message}{note}{where}"
    is_loading = any("connectors/checkpoint_connector" in line.file for line in info.lines)
    if cfg.get("resume") is not None and info.user_line is None and is_loading:
        return refusal(Path(cfg.resume), info.message.rstrip(" .") + ".")
    return None
