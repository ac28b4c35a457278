"""Start from the weights of a checkpoint: what fits is loaded, what does not is listed."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
from torch import Tensor

from harness.convert.conversion import Weights, opened
from harness.convert.tensors import CheckpointError
from harness.errors import UserError
from harness.init.fitting import Fit, fitted, tensors_of, typed_map, with_beginning
from harness.init.parts import bare, places, tops, typed
from harness.init.settings import AUTO, Init, file_of
from harness.names import few, is_below

# The converter names its command's options.
OPTIONS = {
    "--key ": "init.key=",
    "--prefix ": "init.prefix=",
    "--no-ema": "init.ema=false",
    " convert ": " give ",
}
MAX_PARTS = 4  # that a message offers to leave out


@dataclass
class Started:
    """What a run has started from: ``rows`` for the screen, and ``lines`` for the log."""

    rows: dict[str, str]
    lines: list[str]


def start_from(module: pl.LightningModule, init: Init) -> Started:
    """Load a checkpoint's weights into the part of a module that they fit.

    Raises:
        UserError: if they cannot be read, or do not fit as they must; nothing is loaded then.
    """
    assert init.path is not None
    path = file_of(init.path)
    own = tensors_of(module)
    # Only with a child of that name can `module` be something else than a wrapper's.
    has_module = any("module" in name.split(".") for name in own)
    try:
        with ExitStack() as files:
            tried: list[tuple[Weights, Fit]] = []
            for keeps in (False, True)[: 1 + has_module]:
                reading = opened(
                    path, key=init.key, prefix=init.prefix, ema=init.ema, keep_module=keeps
                )
                weights = files.enter_context(reading)
                tried.append((weights, fitted(weights.chosen.tensors, own, init)))
            weights, fit = max(tried, key=lambda pair: (len(pair[1].taken), -len(pair[1].rest)))
            check(fit, weights, own, init)
            values = weights.read(fit.taken.values())
    except CheckpointError as error:
        raise UserError(f"init.path={_in_words_of_init(str(error))}") from error
    actual = {bare(name): name for name in module.state_dict()}
    state = {actual[name]: values[there] for name, there in fit.taken.items()}
    try:
        module.load_state_dict(state, strict=False)
    except RuntimeError as error:  # of a module that checks more than shapes
        reason = " ".join(str(error).split())
        raise UserError(f"init.path={path} does not fit {fit.place}: {reason}") from error
    return told(path, fit, weights)


def check(fit: Fit, weights: Weights, own: Mapping[str, Tensor], init: Init) -> None:
    """Refuse weights that do not fit.

    Raises:
        UserError: says what, and what to type.
    """
    if not fit.taken:
        here, there = few(tops(places(own))), few(tops(places(weights.chosen.tensors)))
        raise UserError(
            f"init.path={init.path}: none of its {len(weights.chosen.tensors)} tensors fits "
            f"{'the module' if init.into == AUTO else fit.place}.\n"
            f"The file has {there}; the module has {here}.\n"
            "init.prefix=<part> takes a part of the file, init.map={old: new} renames."
        )
    if not init.strict or not fit.rest:
        return
    parts = _parts_of(fit.rest, fit)
    said = [f"Type init.strict=false to start {fit.place} from what fits."]
    if len(parts) <= MAX_PARTS:
        left_out = typed([*init.leave_out, *parts])
        said = [f"Type init.leave_out={left_out} to go without these, or init.strict=false."]
    if new_name := _new_name(fit, weights, own):
        said = [f"Type init.map={typed_map({**init.map, **new_name})} if these are the same."]
    said = [*_norms(fit), *said]
    total = len(fit.taken) + len(fit.misshaped) + len(fit.missing)
    raise UserError(
        f"init.path={init.path}: {len(fit.taken)} of the {total} tensors of {fit.place} fit. "
        f"{'; '.join(_faults(fit))}.\n{' '.join(said)}"
    )


def _norms(fit: Fit) -> list[str]:
    """Say where one of the two has BatchNorm: other weights go with another norm."""
    of_file = any(name.endswith(".running_var") for name in fit.unexpected)
    of_module = any(name.endswith(".running_var") for name in fit.missing)
    if of_file and not of_module:
        return [
            "The file's network has BatchNorm, and this one has none: build it as the file's is."
        ]
    if of_module and not of_file:
        return ["This network has BatchNorm, and the file's has not: build it alike."]
    return []


def told(path: Path, fit: Fit, weights: Weights) -> Started:
    """What is said of weights that were loaded."""
    num = len(fit.taken) + len(fit.misshaped) + len(fit.missing)
    rows = {"starts from": f"{path} ({weights.checkpoint.kind})"}
    rows["fits"] = f"{len(fit.taken)} of {num} tensors of {fit.place}"
    if fit.cast:
        rows["fits"] += "".join(f", {n} cast from {a} to {b}" for (a, b), n in fit.cast.items())
    if fit.rest:
        rows["does not fit"] = "; ".join(_faults(fit))
    if fit.left_out:
        rows["left out"] = few(fit.left_out)
    notes = [
        _in_words_of_init(note)
        for note in weights.chosen.notes
        if "taken for a wrapper" not in note
    ]
    if notes:
        rows["note"] = "; ".join(notes[:3])
    lines = [f"{name}: {value}" for name, value in rows.items()]
    lines += [
        f"took {name} <- {weights.chosen.sources[there]}" for name, there in fit.taken.items()
    ]
    lines += [f"another shape: {name} {what}" for name, what in fit.misshaped.items()]
    lines += [f"not in the file: {name}" for name in fit.missing]
    lines += [f"only in the file: {name}" for name in fit.unexpected]
    lines += [f"left out: {name}" for name in fit.left_out]
    others = weights.chosen.left_out + weights.chosen.dropped
    lines += [f"the file holds besides: {', '.join(others)}"] if others else []
    return Started(rows, lines)


def _faults(fit: Fit) -> list[str]:
    """What does not fit, in three lists of a few names each."""
    misshaped = [f"{name} {what}" for name, what in fit.misshaped.items()]
    kinds = {
        "of another shape": misshaped,
        "not in the file": fit.missing,
        "only in the file": fit.unexpected,
    }
    return [f"{len(names)} {kind}: {few(names, 3)}" for kind, names in kinds.items() if names]


def _parts_of(names: Iterable[str], fit: Fit) -> list[str]:
    """The largest parts that the names are in, and in which nothing fits."""
    taken = places(fit.taken)
    parts: dict[str, None] = {}
    for name in names:
        parts[next(place for place in places([name]) if place not in taken)] = None
    return list(parts)


def _new_name(fit: Fit, weights: Weights, own: Mapping[str, Tensor]) -> dict[str, str]:
    """A renaming that would make all of it fit, if there is one."""
    missing = _parts_of(fit.missing, fit)
    unexpected = _parts_of(fit.unexpected, fit)
    if fit.misshaped or len(missing) != 1 or len(unexpected) != 1:
        return {}
    start = len(fit.into) + 1 if fit.into else 0
    old, new = unexpected[0][start:], missing[0][start:]
    there = {
        with_beginning(name, old, new): tensor.shape
        for name, tensor in weights.chosen.tensors.items()
        if is_below(name, [old])
    }
    here = {name[start:]: tuple(own[name].shape) for name in fit.missing}
    return {old: new} if there == here else {}


def _in_words_of_init(text: str) -> str:
    for option, setting in OPTIONS.items():
        text = text.replace(option, setting)
    return text
