"""Collectives of the user's module: ``self.all_gather``, ``torch.distributed``, and lists.

In an evaluation each rank computes whole batches in turn, and some ranks may have one batch fewer.
So a collective within a step could wait forever:

- ``self.all_gather`` in such a step returns the tensor itself: the step has a whole batch.
- A collective of ``torch.distributed`` is refused if some ranks have no batch at the same time.
- Lists that the steps fill are gathered once, before the module's epoch-end hook reads them.

In training, a rank without a sample of a batch computes a sample of another rank. A collective
counts that sample twice, so the run warns of it. The run refuses to gather unequal shapes.
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

from harness.compat.processes import BeforeCollectives
from harness.data.shared_batches import SharedBatchSampler
from harness.distributed.gather import gather
from harness.errors import UserError
from harness.parity.global_batches import BatchSplitter, splitter_of

log = logging.getLogger(__name__)
# Methods of the strategy that ``Gathering`` replaces during a run.
METHODS = ("all_gather", "training_step", "validation_step", "test_step")
LIBRARIES = ("pytorch_lightning", "lightning_fabric", "torchmetrics")  # may call collectives
FSDP_MODULES = ("torch.distributed.fsdp", "torch.distributed._composable")
FRAMEWORK = set(vars(pl.LightningModule()))  # attributes that every module has

ListKey = tuple[str, Any]  # name of an attribute; key in it if it is a dict of lists, else None
Part = tuple[tuple[int, int], list[Any]]  # (loader, batch), and the elements that its step appended


class Gathering:
    """Wrap the strategy's ``all_gather`` and steps, and gather the lists of a module.

    In Lightning, a module's steps append outputs to a list that ``on_validation_epoch_end`` reads.
    Before that hook, ``gather_lists`` gathers the lists in attributes, and in dicts that are
    attributes. The gathered elements have the order of a single process. Elements from before the
    evaluation stay in front of them.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.evaluated: list[tuple[int, int]] = []  # (loader, batch) of each evaluation step
        self.lengths: list[dict[ListKey, int]] = []  # of all lists before each step
        self.batch_idx: int | None = None  # of the running training batch; else None
        self.skips_all_gather = False  # whether ``all_gather`` returns its input
        self.is_alone = False  # whether other ranks have no batch during this rank's last batch
        self.is_padding = False  # whether this rank has no sample of the training batch
        self.has_warned = False
        self.original_all_gather, *steps = (getattr(trainer.strategy, name) for name in METHODS)
        replacements = [self.all_gather, *(partial(self._step, step) for step in steps)]
        vars(trainer.strategy).update(zip(METHODS, replacements, strict=True))

    def remove(self) -> None:
        """Restore the strategy's own methods."""
        for name in METHODS:
            vars(self.trainer.strategy).pop(name, None)

    def begin_batch(
        self, splitter: BatchSplitter | None, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Note which batch runs, and which ranks have samples of it.

        Args:
            splitter: the sampler or stream that splits the batches over the ranks.
            batch_idx: as Lightning counts it on this rank.
            dataloader_idx: the index of the loader.
        """
        is_training = bool(self.trainer.training)
        if not is_training:
            if batch_idx == dataloader_idx == 0:
                self.evaluated, self.lengths = [], []
            self.evaluated.append((dataloader_idx, batch_idx))
            self.lengths.append({path: len(values) for path, values in lists_of(self.module)})
        self.batch_idx = batch_idx if is_training else None
        self.skips_all_gather = self.is_alone = False
        self.is_padding = is_training and splitter is not None and splitter.is_padding(batch_idx)
        if not is_training and isinstance(splitter, SharedBatchSampler) and splitter.is_round_robin:
            # In the last turn, some ranks may have no batch.
            is_last = len(splitter.totals) <= (batch_idx + 1) * splitter.num_ranks
            is_split = is_last and (splitter.splits_last or batch_idx == 0)
            self.skips_all_gather, self.is_alone = not is_split, is_last and not is_split
        model = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # DDP broadcasts rank 0's buffers in each forward. In an evaluation once is enough. In
            # training any rank may read any buffer at any time, so each step needs them.
            is_due = is_training or batch_idx + dataloader_idx == 0
            if model.require_forward_param_sync != is_due:  # setting it is slow
                model.require_forward_param_sync = is_due

    def end_batch(self) -> None:
        """Let ``all_gather`` gather again: the batch and its hooks have ended."""
        self.skips_all_gather, self.is_padding, self.batch_idx = False, False, None

    def gather_lists(self) -> None:
        """Gather the lists that the steps have filled.

        If there are such lists, ``self.all_gather`` returns its input in the epoch-end hook, and
        other collectives are refused in this hook.
        """
        lists = dict(lists_of(self.module))
        pickled = {path: self._pickled(path, values) for path, values in lists.items()}
        pickled = {path: parts for path, parts in pickled.items() if parts != b""}
        by_rank = gather(self.trainer, pickled)
        # Leave out lists that the user clears within the evaluation, or that cannot be pickled.
        paths = [
            path
            for path in dict.fromkeys(path for of_rank in by_rank for path in of_rank)
            if path in lists and all(of_rank.get(path, b"") is not None for of_rank in by_rank)
        ]
        device = self.module.device

        def moved_back(item: OnDevice) -> Tensor:
            return item.tensor.to(device)

        for path in paths:
            parts: list[Part] = []
            for of_rank in by_rank:
                parts += pickle.loads(of_rank[path]) if path in of_rank else []
            parts.sort(key=lambda part: part[0])  # by loader and batch; ranks stay in order
            merged = [element for _, elements in parts for element in elements]
            start = self.lengths[0].get(path, 0)
            lists[path][start:] = apply_to_collection(merged, OnDevice, moved_back)
        self.skips_all_gather = bool(paths)
        if not self.skips_all_gather:
            return
        hook = "on_test_epoch_end" if self.trainer.testing else "on_validation_epoch_end"
        vars(self.module)[hook] = partial(without_collectives, self.module, hook)

    def _pickled(self, path: ListKey, values: list[Any]) -> bytes | None:
        """Pickle the elements that steps appended; None if a list was cleared or is unpicklable."""
        lengths = [before.get(path, 0) for before in self.lengths] + [len(values)]
        steps = zip(self.evaluated, lengths, lengths[1:], strict=False)
        parts = [(batch, values[start:end]) for batch, start, end in steps if start < end]
        if lengths != sorted(lengths):
            return None
        try:
            return pickle.dumps(apply_to_collection(parts, Tensor, _movable)) if parts else b""
        except (pickle.PicklingError, AttributeError, TypeError):
            return None

    def _step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_alone or self.is_padding:
            before = self._refuse_collective if self.is_alone else self._check_collective
            with BeforeCollectives(before):
                return original(*args, **kwargs)
        return original(*args, **kwargs)

    def _check_collective(self) -> None:
        """Warn if the user's own code calls a collective in a padding step."""
        names = [frame.f_globals["__name__"] for frame, _ in walk_stack(None)]
        caller = next(n for n in dropwhile(is_library, names) if n.partition(".")[0] != "torch")
        # Allowed: a backward that reduces gradients, and layers of fsdp that gather parameters.
        is_of_strategy = any(n.startswith(("torch.autograd.graph", *FSDP_MODULES)) for n in names)
        if not (is_of_strategy or is_library(caller) or caller.partition(".")[0] in LIBRARIES):
            self._warn_of_padding()

    def _warn_of_padding(self) -> None:
        if not self.has_warned:
            log.warning(
                "training_step calls a collective (torch.distributed, self.all_gather, or a layer "
                "such as SyncBatchNorm), but rank %d has no sample of this batch. It computes a "
                "sample of another rank, which the collective counts twice.\nUse drop_last=True, "
                "or a batch size that leaves a sample for each rank. self.log, mean_over, sum_over "
                "and torchmetrics count each sample once.",
                self.trainer.global_rank,
            )
        self.has_warned = True

    def _refuse_collective(self) -> None:
        step = "test_step" if self.trainer.testing else "validation_step"
        raise UserError(
            f"{step} calls a collective (torch.distributed, or a metric with "
            "dist_sync_on_step=True), but some ranks have one batch less and would not call it.\n"
            "Remove the collective: log the value, or append it to a list of the module, which "
            "the run gathers at the end. Or call self.all_gather, which returns the whole batch."
        )

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather a tensor, (...) to (ranks, ...), as ``LightningModule.all_gather`` does.

        It returns the tensor itself in a step that has a whole batch, and after ``gather_lists``.

        Raises:
            UserError: the shapes differ. gloo would return garbage, and NCCL would hang.
        """
        if self.skips_all_gather:
            return tensor
        if not self._is_even() and group in (None, dist.group.WORLD):
            if self.is_padding and not tensor.ndim:
                self._warn_of_padding()
            shape_here = "no sample" if self.is_padding and tensor.ndim else tuple(tensor.shape)
            shapes = gather(self.trainer, shape_here)
            if any(shape != shapes[0] for shape in shapes):
                raise UserError(
                    "self.all_gather needs tensors of one shape on all ranks, but the shapes are "
                    f"{', '.join(map(str, shapes))}.\nIn training, the last batch of an epoch may "
                    "be smaller: give the DataLoader drop_last=True, and a batch size that is a "
                    f"multiple of {len(shapes)}, the number of ranks. In an evaluation, append "
                    "the tensor to a list of the module instead. The run gathers such lists."
                )
        return self.original_all_gather(tensor, group=group, sync_grads=sync_grads)

    def _is_even(self) -> bool:
        """Return whether all local batches of this training batch have one size."""
        # With several loaders the splitter is None: each loader may split its batches differently.
        splitter = None if self.batch_idx is None else splitter_of(self.trainer.train_dataloader)
        return (
            isinstance(splitter, SharedBatchSampler) and splitter.weight(self.batch_idx or 0) == 1.0
        )


def without_collectives(module: pl.LightningModule, hook: str) -> None:
    """Call the hook that this function replaces for one call, and refuse collectives in it."""
    del vars(module)[hook]
    with BeforeCollectives(partial(refuse_gathering_again, hook)):
        getattr(module, hook)()


def is_library(name: str) -> bool:
    """Return whether a Python module belongs to this library, whose collectives ignore padding."""
    return name.partition(".")[0] == "harness"


def refuse_gathering_again(hook: str) -> None:
    """Refuse a collective, unless one of ``LIBRARIES`` has called it."""
    packages = (frame.f_globals["__name__"].partition(".")[0] for frame, _ in walk_stack(None))
    if next(name for name in packages if name not in ("harness", "torch")) not in LIBRARIES:
        raise UserError(
            f"{hook} calls torch.distributed, but the module's lists already hold the values of "
            "all processes.\nRemove the call, or use self.all_gather: in this hook it returns its "
            "input."
        )


class OnDevice(NamedTuple):
    """A host copy of a tensor on the module's device. ``gather_lists`` moves it back there."""

    tensor: Tensor


def lists_of(module: pl.LightningModule) -> Iterator[tuple[ListKey, list[Any]]]:
    """Yield the lists in a module's attributes, and in dicts that are attributes, with keys."""
    for name, value in vars(module).items():
        if name in FRAMEWORK:
            continue
        if type(value) is list:
            yield (name, None), value
        elif isinstance(value, dict):
            yield from (((name, key), item) for key, item in value.items() if type(item) is list)


def _movable(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    # Pickling a view would pickle its whole storage.
    return tensor.clone() if tensor.device.type == "cpu" else OnDevice(tensor.cpu())
