"""What a checkpoint holds besides plain values: found before it is written, told or refused."""

import io
import logging
import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from harness.checkpoints.unpickling import Unpickler
from harness.errors import UserError
from harness.run.places import definition
from harness.upstream.plain_globals import plain_globals

log = logging.getLogger(__name__)

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# What Lightning keeps of a container's class beside the hyper-parameters.
NEVER_READ = (*HYPER_PARAMETERS, "hparams_type", "datamodule_hparams_type")
STORAGES = {getattr(torch, name) for name in dir(torch) if name.endswith("Storage")}
PLAIN = {type(None), bool, int, float, str, bytes}
TENSORS = {torch.Tensor, torch.nn.Parameter}
GLOBALS = (type, FunctionType, BuiltinFunctionType)
NO_WAY_ON = " Or train without checkpoints to go on from: checkpoint=null."
NUM_SHOWN = 5  # values of one message


class Odd(NamedTuple):
    """A value that is not plain."""

    place: tuple[Any, ...]  # keys and indices that lead to it, from the top of the checkpoint
    kind: str  # its type
    error: Exception | None  # why it cannot even be pickled

    def __str__(self) -> str:
        return f"{dotted(self.place)} ({self.kind})"


class Contents:
    """Saves checkpoints, and looks at their values once for each kind of them that is new.

    Python's pickler tells of every object that is no number, text, list or dict. While all of them
    are what torch reads as plain values nothing else is done.
    """

    def __init__(self) -> None:
        self.trainer: pl.Trainer | None = None  # whose run goes on from what is saved
        self.plain: set[Any] = {*plain_globals().values(), torch.dtype, *TENSORS, *STORAGES}
        self.looked_at: Counter[Any] = Counter()  # kinds besides, in the last checkpoint
        self.told: set[Any] = set()

    def save(self, checkpoint: dict[str, Any], file: Any) -> None:
        """Write a checkpoint to a file, as ``torch.save`` does.

        Raises:
            UserError: if a run could not go on from it, or a value of it cannot be pickled.
        """
        found: Counter[Any] = Counter()

        class Pickler(pickle.Pickler):
            def reducer_override(pickler, obj: Any) -> Any:  # noqa: N805  # self is the Contents
                kind = obj if isinstance(obj, GLOBALS) else type(obj)
                if kind not in self.plain:
                    found[kind] += 1
                return NotImplemented

            def dump(pickler, obj: Any) -> None:  # noqa: N805
                try:
                    super().dump(obj)
                except Exception as error:  # whatever an author's object raises
                    self.judge(list(odd_values(obj)), error)
                    raise
                if found != self.looked_at:
                    self.look_at(obj, found)

        module = SimpleNamespace(__name__="pickle", Pickler=Pickler)
        torch.save(checkpoint, file, pickle_module=module)

    def look_at(self, checkpoint: dict[str, Any], kinds: Counter[Any]) -> None:
        """Find what is odd in a checkpoint, and remember what is not."""
        found = list(odd_values(checkpoint))
        self.judge(found)
        if not found:
            self.plain |= kinds.keys()
        self.looked_at = Counter() if not found else kinds

    def judge(self, found: list[Odd], error: Exception | None = None) -> None:
        """Refuse what a run could not go on with, and tell of the rest once.

        Raises:
            UserError: names the first that is refused.
        """
        for odd in found:
            if odd.error or (self.trainer and is_read(self.trainer, odd.place)):
                raise UserError(refusal(self.trainer, odd)) from (odd.error or error)
        new = [odd for odd in found if (odd.place[:2], odd.kind) not in self.told]
        self.told |= {(odd.place[:2], odd.kind) for odd in new}
        if new:
            log.warning("%s", notice(new))


def odd_values(value: Any, place: tuple[Any, ...] = (), seen: Any = None) -> Iterator[Odd]:
    """All values of a checkpoint that ``reading.read`` would not give back."""
    kind, seen = type(value), set() if seen is None else seen
    if kind in PLAIN or id(value) in seen:
        return
    seen.add(id(value))
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            yield from odd_values(key, (*place, key), seen)
            yield from odd_values(item, (*place, key), seen)
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            yield from odd_values(item, (*place, index), seen)
    if kind in (OrderedDict, *TENSORS):
        for name, item in vars(value).items():
            yield from odd_values(item, (*place, name), seen)
    elif kind not in (dict, list, tuple):
        yield from odd_itself(value, place)


def odd_itself(value: Any, place: tuple[Any, ...]) -> Iterator[Odd]:
    """Write one value and read it back, but for its tensors."""
    kind = f"the class {name_of(value)}" if isinstance(value, type) else name_of(type(value))
    file = io.BytesIO()
    try:
        pickler = pickle.Pickler(file, protocol=2)  # which torch.save takes
        pickler.persistent_id = lambda obj: "tensor" if type(obj) in TENSORS else None
        pickler.dump(value)
    except Exception as error:  # whatever an author's object raises
        yield Odd(place, kind, error)
        return
    file.seek(0)
    reader = Unpickler(file)
    reader.persistent_load = lambda pid: None  # type: ignore[method-assign]  # as torch does it
    reader.load()
    if reader.odd:
        name = reader.odd[-1]
        yield Odd(place, kind if kind.endswith(name) else f"{kind} with {name}", None)


def is_read(trainer: pl.Trainer, place: tuple[Any, ...]) -> bool:
    """Whether a resume would read the value at a place of the checkpoint."""
    key = place[0]
    if key in NEVER_READ:
        return False
    if key == "callbacks":
        owner = callback_of(trainer, place)
        return owner is None or type(owner).load_state_dict is not pl.Callback.load_state_dict
    if key in own_keys(trainer):
        return True
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    owners: list[Any] = [module, data, *trainer.callbacks]  # type: ignore[attr-defined]
    return any(is_written(owner, "on_load_checkpoint") for owner in owners)


def own_keys(trainer: pl.Trainer) -> set[str]:
    """The keys that Lightning reads by itself."""
    owners = (trainer.datamodule, trainer.precision_plugin)  # type: ignore[attr-defined]
    keys = {type(owner).__qualname__ for owner in owners}
    return keys | {"state_dict", "loops", "optimizer_states", "lr_schedulers", "safe_point"}


def is_written(owner: Any, hook: str) -> bool:
    """Whether a hook is neither Lightning's nor ours, so that nobody knows what it reads."""
    module = getattr(getattr(type(owner), hook, None), "__module__", "harness")
    return module.split(".")[0] not in ("pytorch_lightning", "lightning", "harness")


def callback_of(trainer: pl.Trainer, place: tuple[Any, ...]) -> pl.Callback | None:
    """Whose state it is."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if c.state_key == place[1]), None)


def refusal(trainer: pl.Trainer | None, odd: Odd) -> str:
    """Say what a run could not go on with, who saves it, and what to change."""
    key, name = odd.place[0], odd.place[1] if len(odd.place) > 1 else ""
    why = "cannot be read back without running code of the file"
    if odd.error:
        why = f"cannot be saved: {str(odd.error).partition(chr(10))[0]}"
    if key in HYPER_PARAMETERS:
        return f"{odd} {why}.\nLeave it out with self.save_hyperparameters(ignore=[{name!r}])."
    owner, hook = saver(trainer, odd.place) if trainer else (None, "")
    where = str((hook and definition(owner, hook)) or "").partition(" in ")[0]
    saves = f"{type(owner).__name__}.{hook}" if hook else "what saves it"
    return (
        f"{odd} {why}, so that no run could go on from this checkpoint.\n"
        f"Let {saves}{where and f' ({where})'} give numbers, text, lists, dicts, tensors or "
        f"NumPy arrays instead.{'' if odd.error else NO_WAY_ON}"
    )


def saver(trainer: pl.Trainer, place: tuple[Any, ...]) -> tuple[Any, str]:
    """The object and its method that gave a value to the checkpoint."""
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    match place[0]:
        case "callbacks":
            return callback_of(trainer, place), "state_dict"
        case "optimizer_states" | "lr_schedulers":
            return module, "configure_optimizers"
        case "state_dict":
            return module, "state_dict"
        case key if key == type(data).__qualname__:
            return data, "state_dict"
    owners: list[Any] = [module, data, *trainer.callbacks]  # type: ignore[attr-defined]
    hook = "on_save_checkpoint"
    return next((owner for owner in owners if is_written(owner, hook)), None), hook


def notice(found: list[Odd]) -> str:
    """Say what of a checkpoint only its author's code can build, and what follows."""
    more = f" and {len(found) - NUM_SHOWN} more" if len(found) > NUM_SHOWN else ""
    shown = ", ".join(str(odd) for odd in found[:NUM_SHOWN])
    names = [odd.place[1] for odd in found if odd.place[0] in HYPER_PARAMETERS and odd.place[1:]]
    ignored = ", ".join(f"{name!r}" for name in dict.fromkeys(names))
    avoid = f" self.save_hyperparameters(ignore=[{ignored}]) leaves it out." if names else ""
    return (
        f"The checkpoints keep {shown}{more} as saved, which is not plain: the commands here read "
        "around it, torch.load needs weights_only=False, and scripts/convert_checkpoint.py makes a "
        f"plain file.{avoid}"
    )


def dotted(place: tuple[Any, ...]) -> str:
    """A place as one would type it."""
    keys = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in place]
    return "".join(keys).removeprefix(".")


def name_of(kind: type) -> str:
    """The name of a type."""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
