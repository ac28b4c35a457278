"""Start from the weights of a checkpoint: match them by name and shape, load, list the rest.

In: a module and the settings. Out: rows for the screen and lines for the log.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytorch_lightning as pl
import torch

from harness.convert.conversion import Weights, opened
from harness.convert.tensors import CheckpointError, Tensor
from harness.errors import UserError
from harness.init.settings import Init, bare, check_parts, prefixes
from harness.names import few, is_below

ONLY_IN_FILE = "is only in the file"
MOST_PARTS = 4  # that a message offers to leave out


class Match(NamedTuple):
    """The tensors of a file and of the part of a module that takes them, by the module's names."""

    part: str  # "" is the whole module
    taken: dict[str, str]  # with their names in the file
    misfits: dict[str, str]  # with what is wrong
    left_out: list[str]

    def __str__(self) -> str:
        num = len(self.taken) + sum(why != ONLY_IN_FILE for why in self.misfits.values())
        return f"{len(self.taken)} of the {num} tensors of {self.part or 'the module'}"

    def faults(self, most: int) -> str:
        """Say what does not fit."""
        return few((f"{name} {why}" for name, why in self.misfits.items()), most)


def start_from(module: pl.LightningModule, init: Init) -> tuple[dict[str, str], list[str]]:
    """Load a checkpoint's weights into the part of a module that they fit.

    Returns:
        What was loaded and what was not: rows for the screen, and lines for the log.

    Raises:
        UserError: if they cannot be read, or do not fit as they must; nothing is loaded then.
    """
    assert init.path is not None
    tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    state = module.state_dict(keep_vars=True)  # with each name of what is shared
    own = {bare(name): value for name, value in state.items() if id(value) in tensors}
    path = Path(init.path).expanduser()
    try:
        with opened(path, key=init.key, prefix=init.prefix, ema=init.ema) as weights:
            match = matched(weights.tensors, own, init)
            check(match, init)
            values = weights.each(match.taken.values())
            with torch.no_grad():
                for name, value in zip(match.taken, values, strict=True):
                    own[name].copy_(value)
    except CheckpointError as error:
        raise UserError(f"init.path={with_settings(str(error))}") from error
    return report(match, weights)


def matched(stored: Mapping[str, Tensor], own: Mapping[str, torch.Tensor], init: Init) -> Match:
    """Match a file's tensors with a module's.

    Raises:
        UserError: if a setting names what is not there.
    """
    check_parts(f"init.rename={init.rename}", filter(None, init.rename), stored)
    sources = {renamed(name, init.rename): name for name in stored}
    if len(sources) < len(stored):
        raise UserError(f"init.rename={init.rename} gives two tensors of the file one name.")
    part = destination({name: stored[source] for name, source in sources.items()}, own)
    in_part = {name: value for name, value in own.items() if is_below(name, [part])}
    in_file = {f"{part}.{name}".lstrip("."): source for name, source in sources.items()}
    check_parts(f"init.leave_out={[*init.leave_out]}", init.leave_out, [*own, *in_file])
    match, missing = Match(part, {}, {}, []), []
    for name in dict.fromkeys([*in_part, *in_file]):
        if is_below(name, init.leave_out):
            match.left_out.append(name)
        elif name not in in_part:
            match.misfits[name] = ONLY_IN_FILE
        elif name not in in_file:
            missing.append(name)
        elif why := mismatch(stored[in_file[name]], own[name]):
            match.misfits[name] = why
        else:
            match.taken[name] = in_file[name]
    # A file may have one name of tied weights, and none for the counts of torch before 0.4.1.
    has_value = {id(own[name]) for name in match.taken}
    for name in missing:
        if id(own[name]) not in has_value and not name.endswith(".num_batches_tracked"):
            match.misfits[name] = "is not in the file"
    return match


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Exchange the longest beginning, of whole parts, that is renamed; "" strips or adds."""
    old = max((old for old in rename if is_below(name, [old])), key=len, default="")
    return ".".join(filter(None, (rename.get(old, ""), name[len(old) :].lstrip("."))))


def destination(stored: Mapping[str, Tensor], own: Mapping[str, torch.Tensor]) -> str:
    """Return the part of the module in which most tensors fit; of equal ones an outer one."""
    votes: Counter[str] = Counter()
    for name, value in own.items():
        pieces = name.split(".")
        for depth in range(len(pieces)):
            if (tensor := stored.get(".".join(pieces[depth:]))) is not None:
                # One that fits by its shape too outweighs all that fit by their names alone.
                votes[".".join(pieces[:depth])] += 1 if mismatch(tensor, value) else 1 + len(own)
    return max(votes, key=lambda part: (votes[part], not part, -part.count(".")), default="")


def mismatch(stored: Tensor, own: torch.Tensor) -> str:
    """Say why the module's tensor cannot take that of the file; "" if it can."""
    if tuple(stored.shape) != tuple(own.shape):
        return f"is {tuple(stored.shape)}, here {tuple(own.shape)}"
    dtype: torch.dtype = getattr(torch, stored.dtype)
    is_alike = dtype.is_floating_point == own.is_floating_point()
    return "" if is_alike else f"is {dtype}, here {own.dtype}"


def check(match: Match, init: Init) -> None:
    """Refuse weights that do not fit, or none of which fits.

    Raises:
        UserError: with the names, and what to type.
    """
    if match.taken and not (init.strict and match.misfits):
        return
    advice = "init.rename={old:new} renames parts, init.prefix=<part> takes one of the file."
    fitting = prefixes(match.taken)  # below: the largest parts in which nothing fits
    parts = {next(p for p in prefixes([name]) if p not in fitting): 0 for name in match.misfits}
    if match.taken and len(parts) <= MOST_PARTS:
        left_out = ",".join([*init.leave_out, *parts])
        advice = f"Type init.leave_out=[{left_out}] to go without these, or init.strict=false."
    raise UserError(f"init.path={init.path}: {match} fit. {match.faults(5)}.\n{advice}")


def report(match: Match, weights: Weights) -> tuple[dict[str, str], list[str]]:
    """Return rows with a few names, and lines with all, of what was loaded and what was not."""
    texts = {
        "starts from": f"{weights.checkpoint.path} ({weights.checkpoint.kind})",
        "fits": str(match),
        "does not fit": match.faults(3),
        "left out": few(match.left_out, 3),
        "note": with_settings("; ".join(weights.notes)),
    }
    rows = {row: text for row, text in texts.items() if text}
    lines = [f"{row}: {text}" for row, text in rows.items()]
    lines += [f"took {name} <- {weights.sources[old]}" for name, old in match.taken.items()]
    lines += [f"did not take {name}: {why}" for name, why in match.misfits.items()]
    return rows, lines + [f"left out {name}" for name in match.left_out]


def with_settings(text: str) -> str:
    """Put settings in the place of the converter's options in one of its messages."""
    return re.sub("--(key|prefix) ", r"init.\1=", text).replace("--no-ema", "init.ema=false")
