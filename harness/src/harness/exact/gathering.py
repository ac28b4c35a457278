"""What a module gathers over processes in an evaluation: right without waiting, or refused.

In: ``self.all_gather``, an author's own collectives, and lists that the steps append to. An
evaluation's step has a batch that one process would have, and some processes have one batch less.
So nothing is sent within a step, and lists are gathered at the end, before the module reads them.
"""

import logging
import pickle
from collections.abc import Iterator
from functools import partial
from itertools import dropwhile
from traceback import walk_stack
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from harness.data.shared_batches import SharedBatchSampler
from harness.errors import UserError
from harness.exact.global_batches import Shares, shares_of
from harness.processes.agreement import gather
from harness.upstream.processes import NoCollectives

log = logging.getLogger(__name__)
# Of a strategy, replaced during a run.
METHODS = ("all_gather", "training_step", "validation_step", "test_step")
LIBRARIES = ("pytorch_lightning", "lightning_fabric", "torchmetrics")  # know what they gather
OF_FSDP = ("torch.distributed.fsdp", "torch.distributed._composable")
FRAMEWORK = set(vars(pl.LightningModule()))  # attributes that are not the author's

Path = tuple[str, Any]  # an attribute, and the key in it where it is a dict of lists
Part = tuple[tuple[int, int], list[Any]]  # loader and batch; what the batch has appended


class Gathering:
    """Stand between a module and its strategy's ``all_gather`` and evaluation steps.

    Lightning's way to look at all outputs is a list that the steps fill and
    ``on_validation_epoch_end`` reads. Lists in attributes, and in dicts there, are gathered before
    that hook, in the order of one process; what was in them before the evaluation stays.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.places: list[tuple[int, int]] = []  # loader and batch, of each step of an evaluation
        self.lengths: list[dict[Path, int]] = []  # of all lists, before each step
        self.host_group: Any = None  # of the processes; what is collected need not fit a GPU
        self.batch_idx: int | None = None  # of the running training batch
        self.has_global = False  # this process already has what all of them would gather
        self.is_alone = False  # other processes have no batch in this turn
        self.is_padding = False  # this rank has no sample of the training batch
        self.has_warned = False
        self.original, *steps = (getattr(trainer.strategy, name) for name in METHODS)
        replaced = [self.all_gather, *(partial(self._step, step) for step in steps)]
        vars(trainer.strategy).update(zip(METHODS, replaced, strict=True))

    def remove(self) -> None:
        """Give the strategy its own methods back."""
        for name in METHODS:
            vars(self.trainer.strategy).pop(name, None)

    def begin_batch(self, sharing: Shares | None, batch_idx: int, dataloader_idx: int) -> None:
        """Note which batch runs."""
        is_training = bool(self.trainer.training)
        if not is_training:
            if batch_idx == dataloader_idx == 0:
                self.places, self.lengths = [], []
            self.places.append((dataloader_idx, batch_idx))
            self.lengths.append({path: len(values) for path, values in lists_of(self.module)})
        self.batch_idx = batch_idx if is_training else None
        self.has_global = self.is_alone = False
        self.is_padding = is_training and sharing is not None and sharing.is_padding(batch_idx)
        if not is_training and isinstance(sharing, SharedBatchSampler) and sharing.is_round_robin:
            is_last = len(sharing.totals) <= (batch_idx + 1) * sharing.num_ranks  # and not full
            is_split = is_last and (sharing.splits_last or batch_idx == 0)
            self.has_global, self.is_alone = not is_split, is_last and not is_split
        model = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # DDP sends the first process's buffers in each forward; in an evaluation they stay.
            model.require_forward_param_sync = is_training or batch_idx + dataloader_idx == 0

    def end_batch(self) -> None:
        """Gather from all processes again what is gathered after a batch and its hooks."""
        self.has_global, self.is_padding, self.batch_idx = False, False, None

    def gather_lists(self) -> None:
        """Gather what the module has collected, and let its hook at the end gather nothing."""
        self.host_group = self.host_group or dist.new_group(backend="gloo")
        lists = dict(lists_of(self.module))
        packed = {path: self._packed(path, values) for path, values in lists.items()}
        packed = {path: parts for path, parts in packed.items() if parts != b""}
        everyone = gather(self.trainer, packed, self.host_group)
        # An author may clear a list within the evaluation, or keep what cannot leave a process.
        paths = [
            path
            for path in dict.fromkeys(path for one in everyone for path in one)
            if path in lists and all(one.get(path, b"") is not None for one in everyone)
        ]
        device = self.module.device

        def moved_back(one: OnDevice) -> Tensor:
            return one.tensor.to(device)

        for path in paths:
            parts: list[Part] = []
            for one in everyone:
                parts += pickle.loads(one[path]) if path in one else []
            parts.sort(key=lambda part: part[0])  # by loader and turn; in each by rank
            merged = [element for _, elements in parts for element in elements]
            start = self.lengths[0].get(path, 0)
            lists[path][start:] = apply_to_collection(merged, OnDevice, moved_back)
        self.has_global = bool(paths)
        if not self.has_global:
            return
        hook = "on_test_epoch_end" if self.trainer.testing else "on_validation_epoch_end"
        vars(self.module)[hook] = partial(without_collectives, self.module, hook)

    def _packed(self, path: Path, values: list[Any]) -> bytes | None:
        """Pickle what the steps have appended; ``None`` if a list was cleared or cannot be sent."""
        marks = [lengths.get(path, 0) for lengths in self.lengths] + [len(values)]
        steps = zip(self.places, marks, marks[1:], strict=False)
        parts = [(place, values[low:high]) for place, low, high in steps if low < high]
        if marks != sorted(marks):
            return None
        try:
            return pickle.dumps(apply_to_collection(parts, Tensor, _movable)) if parts else b""
        except (pickle.PicklingError, AttributeError, TypeError):
            return None

    def _step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_alone or self.is_padding:
            look = self._refuse_collective if self.is_alone else self._look_at_collective
            with NoCollectives(look):
                return original(*args, **kwargs)
        return original(*args, **kwargs)

    def _look_at_collective(self) -> None:
        names = [frame.f_globals["__name__"] for frame, _ in walk_stack(None)]
        caller = next(n for n in dropwhile(is_harness, names) if n.partition(".")[0] != "torch")
        # In manual optimisation a backward reduces gradients, and fsdp's layers gather parameters.
        is_of_strategy = any(n.startswith(("torch.autograd.graph", *OF_FSDP)) for n in names)
        if not (is_of_strategy or is_harness(caller) or caller.partition(".")[0] in LIBRARIES):
            self._warn_of_padding()

    def _warn_of_padding(self) -> None:
        if not self.has_warned:
            log.warning(
                "training_step calls a collective of its own (of torch.distributed, "
                "self.all_gather, or in a layer such as SyncBatchNorm), and rank %d has no sample "
                "of this batch: it computes one of another rank, which is counted twice. Use "
                "drop_last=True, or a batch size that leaves a sample for each rank. self.log, "
                "mean_over, sum_over and torchmetrics count each sample once.",
                self.trainer.global_rank,
            )
        self.has_warned = True

    def _refuse_collective(self) -> None:
        step = "test_step" if self.trainer.testing else "validation_step"
        raise UserError(
            f"{step} waits for other processes, by torch.distributed or a metric with "
            "dist_sync_on_step=True, and some of them have one batch less.\n"
            "Leave it to the harness: log the value, append to a list of the module, or use "
            "self.all_gather, which gives a step its own whole batch."
        )

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather a tensor, (...) to (processes, ...), as ``LightningModule.all_gather`` does.

        Different shapes are refused: gloo would join garbage, and NCCL would wait.
        """
        if self.has_global:
            return tensor
        if not self._is_even() and group in (None, dist.group.WORLD):
            if self.is_padding and not tensor.ndim:
                self._warn_of_padding()
            own = "no sample" if self.is_padding and tensor.ndim else tuple(tensor.shape)
            shapes = gather(self.trainer, own)
            if any(shape != shapes[0] for shape in shapes):
                raise UserError(
                    "self.all_gather needs one shape in all processes, and they have "
                    f"{', '.join(map(str, shapes))}.\n"
                    "In training, the last batch of an epoch may be smaller: give the DataLoader "
                    "drop_last=True, and a batch size that the processes divide. "
                    "At the end of an evaluation, append to a list of the module instead: lists "
                    "are gathered."
                )
        return self.original(tensor, group=group, sync_grads=sync_grads)

    def _is_even(self) -> bool:
        """Return whether a training batch runs in shares of one size, so that no shape is sent."""
        # Of several loaders the shares may differ in size, each in its own way.
        only = None if self.batch_idx is None else shares_of(self.trainer.train_dataloader)
        return isinstance(only, SharedBatchSampler) and only.weight(self.batch_idx or 0) == 1.0


def without_collectives(module: pl.LightningModule, hook: str) -> None:
    """Call a hook of a module once in the place of which this stands, and refuse collectives."""
    del vars(module)[hook]
    with NoCollectives(partial(refuse_gathering_again, hook)):
        getattr(module, hook)()


def is_harness(name: str) -> bool:
    """Return whether a module is part of the harness, which counts padding as no sample."""
    return name.partition(".")[0] == "harness"


def refuse_gathering_again(hook: str) -> None:
    """Refuse a collective that the author has begun, not one of the libraries."""
    packages = (frame.f_globals["__name__"].partition(".")[0] for frame, _ in walk_stack(None))
    if next(name for name in packages if name not in ("harness", "torch")) not in LIBRARIES:
        raise UserError(
            f"{hook} calls torch.distributed, and the lists of the module already hold what all "
            "processes have collected.\nLeave it out, or use self.all_gather, which knows."
        )


class OnDevice(NamedTuple):
    """A tensor, on the host, that goes back to the module's device."""

    tensor: Tensor


def lists_of(module: pl.LightningModule) -> Iterator[tuple[Path, list[Any]]]:
    """Iterate over the lists that are attributes of a module, and those in its dicts."""
    for name, value in vars(module).items():
        if name in FRAMEWORK:
            continue
        if type(value) is list:
            yield (name, None), value
        elif isinstance(value, dict):
            yield from (((name, key), item) for key, item in value.items() if type(item) is list)


def _movable(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    # A view would take its whole storage with it.
    return tensor.clone() if tensor.device.type == "cpu" else OnDevice(tensor.cpu())
