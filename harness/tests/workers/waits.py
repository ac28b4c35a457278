"""A callback that counts what makes the host wait for the device between two rows of the log.

On a GPU ``torch.cuda.set_sync_debug_mode`` finds them. On the CPU, where nothing waits, a mode
looks at each call of torch for those that would: it knows the tensors that would be on the host of
a GPU (made without a device, or copied there) from all others.
"""

import json
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.overrides import TorchFunctionMode

from harness import mean_over, sum_over

# Functions that return to Python what a tensor holds, or a tensor whose size that decides.
READS = {"item", "tolist", "numpy", "is_nonzero", "nonzero", "masked_select", "unique", "equal"}
READS |= {"allclose", "bincount", "repeat_interleave", "argwhere", "unique_consecutive"}
READS |= {"__bool__", "__float__", "__int__", "__index__", "__contains__"}
READS |= {"__repr__", "__format__", "__array__", "__complex__"}
MAKERS = ("tensor", "as_tensor", "asarray", "new_tensor")
COLLECTIVES = ("barrier", "monitored_barrier", "broadcast_object_list")
COLLECTIVES += ("all_gather", "all_gather_object")
ENGINE = "_engine_run_backward"
DATA = "/torch/utils/data/"  # where a loader makes batches
# Numbers that are asked for only where the device is the CPU.
ONLY_ON_CPU = {("non_finite.py", "on_before_backward"), ("mean_over.py", "check_arguments")}
PACKAGES = (
    "/torch/",
    "/pytorch_lightning/",
    "/lightning_fabric/",
    "/torchmetrics/",
    "/lightning_utilities/",
    "/contextlib.py",
)


class Waits(pl.Callback):
    """Count from one step to a later one, and write ``{place: number}`` into a folder."""

    def __init__(self, folder: str, first: int = 11, last: int = 18) -> None:
        self.folder, self.first, self.last = Path(folder), first, last
        self.places: Counter[str] = Counter()
        self.stack = ExitStack()
        self.is_counting = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if pl_module.device.type == "cpu":
            mode = HostWaits(self.note)
            self.stack.enter_context(patch.object(autograd, ENGINE, mode.inside(ENGINE)))
            self.stack.enter_context(mode)
        for name in COLLECTIVES:
            function = getattr(dist, name)
            self.stack.enter_context(patch.object(dist, name, self.noting(name, function)))

    def noting(self, name: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return function(*args, **kwargs)

        return noted

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.first and not self.is_counting:
            self.is_counting = True
            if module.device.type == "cuda":
                self.stack.enter_context(synchronisations(self.note))
        elif trainer.global_step == self.last and self.is_counting:
            self.is_counting = False
            self.stack.close()
            path = self.folder / f"waits_{trainer.global_rank}.json"
            path.write_text(json.dumps(self.places))

    def note(self, name: str) -> None:
        if not self.is_counting:
            return
        frames = [f for f in reversed(traceback.extract_stack()) if f.filename != __file__]
        own = [f for f in frames if not any(package in f.filename for package in PACKAGES)]
        nearest = own[0] if own else frames[0]
        is_known = (Path(nearest.filename).name, nearest.name) in ONLY_ON_CPU
        if not is_known and not any(DATA in f.filename for f in frames):
            places = [f"{Path(f.filename).name}:{f.lineno}:{f.name}" for f in (nearest, *own[1:2])]
            self.places[" < ".join([name, *places])] += 1


@contextmanager
def synchronisations(note: Callable[[str], None]) -> Iterator[None]:
    """Note what torch warns of: on a GPU alone."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            note("synchronisation")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # setting the mode warns as well
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        warnings.showwarning = show
        try:
            yield
        finally:
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")


class HostWaits(TorchFunctionMode):
    """Note calls that would wait for a GPU, among them copies from memory that is not pinned."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def inside(self, name: str) -> Any:
        """A function of torch.autograd that calls hooks, of which a mode alone sees nothing."""
        function = getattr(autograd, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return called

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        tensors = [one for one in leaves((args, kwargs)) if isinstance(one, Tensor)]
        comes_from_device = any(not hasattr(one, "is_of_host") for one in tensors)
        is_for_device = where(name, args, kwargs, comes_from_device)
        if self._waits(name, args, kwargs, comes_from_device, is_for_device):
            self.note(name)
        result = function(*args, **kwargs)
        for one in leaves(result):
            if isinstance(one, Tensor) and not any(one is tensor for tensor in tensors):
                mark(one, is_for_device)
        if isinstance(result, Tensor) and is_for_device != comes_from_device and name in COPIES:
            result = result.view_as(result)  # on the CPU it may be the same tensor
            mark(result, is_for_device)
        return result

    @staticmethod
    def _waits(name: str, args: Any, kwargs: Any, comes_from: bool, is_for: bool) -> bool:
        if name in READS:
            return comes_from
        if name in MAKERS and (name == "new_tensor" or not isinstance(args[0], Tensor)):
            return is_for or comes_from
        if name == "copy_":
            ends = [hasattr(one, "is_of_host") for one in args[:2]]
            is_async = kwargs.get("non_blocking") or args[2:3] == (True,)
            return ends[0] != ends[1] and not is_async
        if name in COPIES:
            return comes_from != is_for and not kwargs.get("non_blocking")
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else args[1:2]
            is_fill = name == "__setitem__" and not isinstance(args[2], Tensor)
            return comes_from and any(is_read(one, is_fill) for one in index)
        if name == "where":
            return comes_from and len(args) == 1
        if name == "one_hot":  # looks for the largest number
            return comes_from and (*args[1:], *kwargs.values(), -1)[0] == -1
        return False


def is_read(index: Any, is_fill: bool) -> bool:
    """Return whether an index of a tensor is copied to the host, or says how many elements it has.

    To fill the places of a mask with one number, torch does not count them.
    """
    if isinstance(index, slice):
        return any(isinstance(end, Tensor) for end in (index.start, index.stop, index.step))
    if not isinstance(index, Tensor):
        return isinstance(index, list)
    return (index.dtype == torch.bool and not is_fill) or (index.ndim == 0 and not is_fill)


COPIES = ("to", "cpu", *MAKERS)


def where(name: str, args: Any, kwargs: Any, comes_from_device: bool) -> bool:
    """Whether a result would be on the device: names in the code are of the host."""
    if name == "cpu":
        return False
    given = [kwargs.get("device"), *(args[1:2] if name == "to" else ())]
    for one in given:
        if isinstance(one, (str, torch.device)):
            return isinstance(one, torch.device)
        if isinstance(one, Tensor):
            return not hasattr(one, "is_of_host")
    return comes_from_device


def mark(tensor: Tensor, is_of_device: bool) -> None:
    if not is_of_device:
        tensor.is_of_host = True  # type: ignore[attr-defined]


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = [*tree.values()]
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from leaves(one)
    else:
        yield tree


class Weighted(pl.LightningModule):
    """A loss with terms that are divided by numbers of Python, or by tensors of the device."""

    def __init__(self, terms: list[str]) -> None:
        super().__init__()
        self.net, self.terms = nn.Linear(64, 4), terms

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mean = self.net(batch[0].flatten(1)).square().mean()
        numbers = {"number": len(batch[1]) // 2, "tensor": (batch[1] > 3).sum()}
        over = {"mean": mean_over, "sum": sum_over}
        terms = [term.split("_") for term in self.terms]
        return torch.stack([over[how](mean, numbers[kind]) for how, kind in terms]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)
