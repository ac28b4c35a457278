"""Start from the weights of a checkpoint: match them by name and shape, load them, list the rest.

In: a module and the settings. Out: rows for the screen, and lines for the log.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytorch_lightning as pl
import torch

from harness.convert.conversion import Weights, opened
from harness.convert.tensors import CheckpointError, StoredTensor
from harness.display import join_first
from harness.errors import UserError
from harness.init.settings import Init, bare_name, check_parts, prefixes
from harness.keys import is_within

ONLY_IN_FILE = "is only in the file"
MAX_SUGGESTED = 4  # parts that a message suggests for init.leave_out


class Match(NamedTuple):
    """Which tensors of a file fit a module. Names and keys are the module's."""

    part: str  # the part of the module that the weights fit; "" is the whole module
    matched: dict[str, str]  # name -> name in the file
    misfits: dict[str, str]  # name -> the reason
    left_out: list[str]  # names that init.leave_out covers

    def __str__(self) -> str:
        num = len(self.matched) + sum(why != ONLY_IN_FILE for why in self.misfits.values())
        return f"{len(self.matched)} of the {num} tensors of {self.part or 'the module'}"

    def faults(self, most: int) -> str:
        """Return the first misfits, each with its reason."""
        return join_first((f"{name} {why}" for name, why in self.misfits.items()), most)


def start_from(module: pl.LightningModule, init: Init) -> tuple[dict[str, str], list[str]]:
    """Load a checkpoint's weights into the part of a module that they fit.

    Returns:
        Rows for the screen and lines for the log: which weights were loaded, and which were not.

    Raises:
        UserError: the file cannot be read, or its weights do not fit; nothing is loaded then.
    """
    assert init.path is not None
    tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    state = module.state_dict(keep_vars=True)  # has every name of a shared tensor
    own = {bare_name(name): value for name, value in state.items() if id(value) in tensors}
    path = Path(init.path).expanduser()
    try:
        with opened(path, key=init.key, prefix=init.prefix, ema=init.ema) as weights:
            match = match_tensors(weights.tensors, own, init)
            check(match, init)
            values = weights.each(match.matched.values())
            with torch.no_grad():
                for name, value in zip(match.matched, values, strict=True):
                    own[name].copy_(value)
    except CheckpointError as error:
        raise UserError(f"init.path={with_settings(str(error))}") from error
    return report(match, weights)


def match_tensors(
    stored: Mapping[str, StoredTensor], own: Mapping[str, torch.Tensor], init: Init
) -> Match:
    """Match a file's tensors, ``stored``, with a module's, ``own``, by name and shape.

    Raises:
        UserError: a setting names a part that does not exist, or gives two tensors one name.
    """
    check_parts(f"init.rename={init.rename}", filter(None, init.rename), stored)
    sources = {rename_parts(name, init.rename): name for name in stored}
    if len(sources) < len(stored):
        raise UserError(
            f"init.rename={init.rename} gives two tensors of the file the same name. Give them "
            "different names, or load only a part of the file with init.prefix=<part>."
        )
    part = best_part({name: stored[source] for name, source in sources.items()}, own)
    in_part = {name: value for name, value in own.items() if is_within(name, [part])}
    in_file = {f"{part}.{name}".lstrip("."): source for name, source in sources.items()}
    check_parts(f"init.leave_out={[*init.leave_out]}", init.leave_out, [*own, *in_file])
    match, missing = Match(part, {}, {}, []), []
    for name in dict.fromkeys([*in_part, *in_file]):
        if is_within(name, init.leave_out):
            match.left_out.append(name)
        elif name not in in_part:
            match.misfits[name] = ONLY_IN_FILE
        elif name not in in_file:
            missing.append(name)
        elif why := mismatch(stored[in_file[name]], own[name]):
            match.misfits[name] = why
        else:
            match.matched[name] = in_file[name]
    # The file may have only one name of tied weights, or be of torch 0.4, without counts.
    has_value = {id(own[name]) for name in match.matched}
    for name in missing:
        if id(own[name]) not in has_value and not name.endswith(".num_batches_tracked"):
            match.misfits[name] = "is not in the file"
    return match


def rename_parts(name: str, rename: Mapping[str, str]) -> str:
    """Rename the longest beginning of a name that ``rename`` lists, by parts between dots.

    The new beginning "" removes the old one. The old beginning "" adds the new one to each name.
    """
    old = max((old for old in rename if is_within(name, [old])), key=len, default="")
    return ".".join(filter(None, (rename.get(old, ""), name[len(old) :].lstrip("."))))


def best_part(stored: Mapping[str, StoredTensor], own: Mapping[str, torch.Tensor]) -> str:
    """Return the part of the module that most of the file's tensors fit, outer parts preferred."""
    votes: Counter[str] = Counter()
    for name, value in own.items():
        path = name.split(".")
        for depth in range(len(path)):
            if (tensor := stored.get(".".join(path[depth:]))) is not None:
                # A tensor that fits by name and shape outweighs all that fit only by name.
                votes[".".join(path[:depth])] += 1 if mismatch(tensor, value) else 1 + len(own)
    return max(votes, key=lambda part: (votes[part], not part, -part.count(".")), default="")


def mismatch(stored: StoredTensor, own: torch.Tensor) -> str:
    """Return why a file's tensor does not fit a module's, or "" if it fits."""
    if tuple(stored.shape) != tuple(own.shape):
        return f"is {tuple(stored.shape)} in the file, {tuple(own.shape)} in the module"
    dtype: torch.dtype = getattr(torch, stored.dtype)
    is_alike = dtype.is_floating_point == own.is_floating_point()
    return "" if is_alike else f"is {dtype} in the file, {own.dtype} in the module"


def check(match: Match, init: Init) -> None:
    """Check that weights fit: all of them with ``init.strict``, otherwise at least one.

    Raises:
        UserError: they do not; the message lists misfits and what to type.
    """
    if match.matched and not (init.strict and match.misfits):
        return
    advice = (
        "Rename parts with init.rename={old:new}, or choose a part of the file with "
        "init.prefix=<part>."
    )
    fitting = prefixes(match.matched)  # parts that contain a tensor that fits
    # The largest parts that contain no tensor that fits.
    parts = {next(p for p in prefixes([name]) if p not in fitting): 0 for name in match.misfits}
    if match.matched and len(parts) <= MAX_SUGGESTED:
        left_out = ",".join([*init.leave_out, *parts])
        advice = f"Leave them out with init.leave_out=[{left_out}], or set init.strict=false."
    raise UserError(f"init.path={init.path}: {match} fit. {match.faults(5)}.\n{advice}")


def report(match: Match, weights: Weights) -> tuple[dict[str, str], list[str]]:
    """Return a table for the screen with a few tensors, and lines for the log with all of them."""
    texts = {
        "starts from": f"{weights.checkpoint.path} ({weights.checkpoint.kind})",
        "fits": str(match),
        "does not fit": match.faults(3),
        "left out": join_first(match.left_out, 3),
        "note": with_settings("; ".join(weights.notes)),
    }
    rows = {row: text for row, text in texts.items() if text}
    lines = [f"{row}: {text}" for row, text in rows.items()]
    lines += [f"loaded {name} <- {weights.sources[old]}" for name, old in match.matched.items()]
    lines += [f"not loaded: {name} {why}" for name, why in match.misfits.items()]
    return rows, lines + [f"left out {name}" for name in match.left_out]


def with_settings(text: str) -> str:
    """Replace the converter's options in one of its messages by settings of ``init``."""
    return re.sub("--(key|prefix) ", r"init.\1=", text).replace("--no-ema", "init.ema=false")
