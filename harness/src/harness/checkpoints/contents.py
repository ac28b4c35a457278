"""What a checkpoint holds besides plain values: found before it is written, told or refused."""

import io
import logging
import pickle
from collections import Counter, OrderedDict
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from harness.checkpoints.unpickling import Unpickler
from harness.errors import UserError
from harness.names import few
from harness.places import definition
from harness.upstream.plain_globals import plain_globals

log = logging.getLogger(__name__)

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# What Lightning keeps of a container's class beside the hyper-parameters.
NEVER_READ = (*HYPER_PARAMETERS, "hparams_type", "datamodule_hparams_type")
STORAGES = {getattr(torch, name) for name in dir(torch) if name.endswith("Storage")}
PLAIN = (type(None), bool, int, float, str, bytes)
TENSORS = (torch.Tensor, torch.nn.Parameter)
GLOBALS = (type, FunctionType, BuiltinFunctionType)
NUM_SHOWN = 5  # values of one message


class Odd(NamedTuple):
    """A value that is not plain."""

    place: tuple[Any, ...]  # keys and indices that lead to it, from the top of the checkpoint
    kind: str  # its type
    error: Exception | None  # why it cannot even be pickled

    def __str__(self) -> str:
        keys = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.place]
        return f"{''.join(keys).removeprefix('.')} ({self.kind})"


class Contents:
    """Saves checkpoints, and looks at their values where a kind of them is new, or more of one.

    Python's pickler tells of every object that is no number, text, list or dict. While all of them
    are what torch reads as plain values nothing else is done.
    """

    def __init__(self) -> None:
        self.trainer: pl.Trainer | None = None  # whose run goes on from what is saved
        self.plain: set[Any] = {*plain_globals().values(), torch.dtype, *STORAGES}
        self.looked_at: Counter[Any] = Counter()  # kinds besides, in the last checkpoint
        self.told: set[Any] = set()

    def save(self, checkpoint: dict[str, Any], file: Any) -> None:
        """Write a checkpoint to a file, as ``torch.save`` does.

        Raises:
            UserError: if a run could not go on from it, or a value of it cannot be pickled.
        """
        plain, kinds = self.plain, Counter[Any]()

        class Pickler(pickle.Pickler):
            def reducer_override(self, obj: Any) -> Any:
                kind = obj if isinstance(obj, GLOBALS) else type(obj)
                if kind not in plain:
                    kinds[kind] += 1
                return NotImplemented

        module = SimpleNamespace(__name__="pickle", Pickler=Pickler)
        try:
            torch.save(checkpoint, file, pickle_module=module)
        except Exception:  # whatever an author's object raises
            self.judge(checkpoint)
            raise
        if kinds != self.looked_at:
            is_plain = not self.judge(checkpoint)
            self.plain |= kinds.keys() if is_plain else set()
            self.looked_at = Counter() if is_plain else kinds

    def judge(self, checkpoint: dict[str, Any]) -> list[Odd]:
        """Refuse what a run could not go on with, and tell of the rest once.

        Raises:
            UserError: names the first that is refused.
        """
        found = odd_values(checkpoint)
        for odd in found:
            owner, method, is_read = saver(self.trainer, odd.place)
            if is_read or odd.error:
                raise UserError(refusal(odd, owner, method)) from odd.error
        new = [odd for odd in found if (odd.place[:2], odd.kind) not in self.told]
        self.told |= {(odd.place[:2], odd.kind) for odd in new}
        if new:
            log.warning("%s", notice(new))
        return found


class ButTensors(pickle.Pickler):
    """Pickle all but tensors, of which it takes what authors have hung on them.

    A class: the attribute of a pickler cannot be set in Python 3.13.0.
    """

    def persistent_id(self, obj: Any) -> Any:
        """The attributes of a tensor."""
        return vars(obj) if type(obj) in TENSORS else None


def odd_values(value: Any, place: tuple[Any, ...] = (), around: Any = ()) -> list[Odd]:
    """The innermost parts of a value that ``reading.read`` would not give back.

    Args:
        value: is written and read back, but for its tensors; so are its parts if it is odd.
        place: of the value.
        around: what it is a part of, by id.
    """
    if type(value) in PLAIN or id(value) in around:
        return []
    file, error = io.BytesIO(), None
    pickler = ButTensors(file, protocol=2)  # which torch.save takes
    reader: Any = Unpickler(file)
    reader.persistent_load = lambda attributes: None
    try:
        pickler.dump(value)
    except Exception as raised:  # whatever an author's object raises
        error = raised
    else:
        file.seek(0)
        reader.load()
        if not reader.odd:
            return []
    kind: Any = type(value)
    parts: Any = ()
    if kind in (dict, OrderedDict, list, tuple):
        parts = enumerate(value) if kind in (list, tuple) else value.items()
    around = {*around, id(value)}
    found = [odd for key, part in parts for odd in odd_values(part, (*place, key), around)]
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if reader.odd and not name.endswith(reader.odd[-1]):
        name += f" with {reader.odd[-1]}"
    return found or [Odd(place, name, error)]


def saver(trainer: pl.Trainer | None, place: tuple[Any, ...]) -> tuple[Any, str, bool]:
    """Who gave a value to the checkpoint, by which method, and whether a resume reads it."""
    if trainer is None or place[0] in NEVER_READ:
        return None, "", False
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    match place[0]:
        case "callbacks":
            owner = next((c for c in callbacks if (c.state_key,) == place[1:2]), None)
            is_unread = getattr(type(owner), "load_state_dict", 0) is pl.Callback.load_state_dict
            return owner, "state_dict", not is_unread
        case "optimizer_states" | "lr_schedulers":
            return module, "configure_optimizers", True
        case "state_dict":
            return module, "state_dict", True
        case key if key == type(data).__qualname__:
            return data, "state_dict", True
    owners = [module, data, *callbacks]
    owner = next((owner for owner in owners if is_written(owner, "on_save_checkpoint")), None)
    precision = type(trainer.precision_plugin).__qualname__
    is_read = place[0] in ("loops", "safe_point", precision)
    is_read |= any(is_written(owner, "on_load_checkpoint") for owner in owners)
    return owner, "on_save_checkpoint", is_read


def is_written(owner: Any, hook: str) -> bool:
    """Whether a hook is neither Lightning's nor ours, so that nobody knows what it reads."""
    module = getattr(getattr(type(owner), hook, None), "__module__", "harness")
    return module.split(".")[0] not in ("pytorch_lightning", "lightning", "harness")


def refusal(odd: Odd, owner: Any, method: str) -> str:
    """Say what a run could not go on with, who saves it, and what to change."""
    why = "cannot be read back without running code of the file"
    if odd.error:
        why = f"cannot be saved: {str(odd.error).partition(chr(10))[0]}"
    if odd.place[0] in HYPER_PARAMETERS:
        ignored = list(odd.place[1:2])
        return f"{odd} {why}.\nLeave it out with self.save_hyperparameters(ignore={ignored})."
    saves = f"{type(owner).__name__}.{method}" if owner else "what saves it"
    if owner and (where := definition(owner, method)):
        saves += f" ({str(where).partition(' in ')[0]})"
    no_way_on = " Or train without checkpoints to go on from: checkpoint=null."
    return (
        f"{odd} {why}, so that no run could go on from this checkpoint.\nLet {saves} give numbers, "
        f"text, lists, dicts, tensors or arrays of numbers instead.{'' if odd.error else no_way_on}"
    )


def notice(found: list[Odd]) -> str:
    """Say what of a checkpoint only its author's code can build, and what follows."""
    names = [odd.place[1] for odd in found if odd.place[0] in HYPER_PARAMETERS and odd.place[1:]]
    ignored = list(dict.fromkeys(names))
    avoid = f" self.save_hyperparameters(ignore={ignored}) leaves it out." if names else ""
    return (
        f"The checkpoints keep {few(found, NUM_SHOWN)} as saved, which is not plain: the commands "
        "here read around it, torch.load needs weights_only=False, and "
        f"scripts/convert_checkpoint.py makes a plain file.{avoid}"
    )
