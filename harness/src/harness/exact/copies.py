"""Copies of a module that compute a training step together, as the processes of a run do.

In: the module of a run, and the samples of a step in shares. Out: the gradients of each step of an
optimizer, and the values that each copy has logged. Copies are threads of one process, for on a
GPU no other one can compute: torch's autograd does not work in forks of a process that has used it
there. `stand_ins.py` has what they meet in place of a run; `first_batch_check.py` compares them.
"""

import contextlib
import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from harness.data.randomness import generator_states, same_states, seed_generators
from harness.exact.mean_over import Means, use
from harness.exact.seeded_steps import dropouts
from harness.exact.self_log import operation
from harness.exact.stand_ins import Group, Trainer
from harness.strategies.sync_batch_norm import BATCH_NORMS

Gradients = dict[str, Tensor]  # by the names of parameters
Prepare = Callable[[pl.LightningModule, int], object]
PLAIN = (bool, int, float, str)
CONTAINERS = (list, dict, set)
MOST_ELEMENTS = 1000  # of a container of a file or a class; a larger one is a table that is read


class Copies:
    """Run steps on copies of a module, each with its share of the batch, in full precision.

    Args:
        module: belongs to a trainer, and is not changed.
        sizes: the samples that each copy gets.
        prepare: is given each copy, and its number of samples, such as to split its calls.
    """

    def __init__(
        self, module: pl.LightningModule, sizes: Sequence[int], prepare: Prepare | None = None
    ) -> None:
        self.module, self.trainer = module, module.trainer
        plugin = self.trainer.precision_plugin
        # The rounding of mixed precision hides small differences.
        is_mixed = isinstance(plugin, MixedPrecision)
        self.context = contextlib.nullcontext if is_mixed else plugin.train_step_context
        self.shares = [size / sum(sizes) for size in sizes]
        self.group = Group(len(sizes), gathers=int(self.trainer.accumulate_grad_batches) == 1)
        self.has_drawn = False  # random numbers, in any step
        self.logged: list[dict[str, Any]] = [{} for _ in sizes]  # name: value, reduction, size
        self.steps: list[Gradients] = []  # what optimizers are asked to step with
        self.copies = [self._make_replica(rank) for rank in range(len(sizes))]
        self.named = [
            {name: p for name, p in replica.named_parameters() if p.requires_grad}
            for replica in self.copies
        ]
        for replica, size in zip(self.copies, sizes, strict=True):
            if prepare is not None:
                prepare(replica, size)

    def _make_replica(self, rank: int) -> Any:
        """Copy the module with stubs for logs and steps, dropout off, BatchNorm in evaluation."""
        replica, optimizers = copy_of(self.module, self.trainer.optimizers)
        replica.trainer = Trainer(self.trainer, optimizers, rank, self.group)
        for optimizer in optimizers:
            optimizer.step = partial(self.step, optimizer)
            optimizer.optimizer = optimizer  # as of a LightningOptimizer
        for _ in dropouts(replica, switch_off=True):
            pass
        for part in replica.modules():
            if isinstance(part, BATCH_NORMS) and part.track_running_stats:
                part.eval()  # BatchNorm over shares has a line of its own
        num_schedules = len(self.trainer.lr_scheduler_configs)
        schedules = [
            SimpleNamespace(step=lambda *_, **__: None, get_last_lr=lambda: [0.0])
        ] * num_schedules
        vars(replica).update(
            log=partial(self.log, rank),
            print=lambda *_, **__: None,
            clip_gradients=lambda *_, **__: None,
            manual_backward=self.backward,
            optimizers=lambda *_, **__: optimizers[0] if len(optimizers) == 1 else optimizers,
            lr_schedulers=lambda: schedules[0] if num_schedules == 1 else schedules or None,
        )
        return replica

    def run(self, batches: Sequence[Any], number: int) -> list[Gradients]:
        """Compute a training step; return the gradients of each step of an optimizer.

        Raises:
            UnequalError: one copy steps or gathers where another does not.
            UnequalShapesError: what copies gather has the shape of their shares.
        """
        self.steps, group = [], self.group
        means = [
            Means(replica.trainer, lambda share=share: share * group.size)  # type: ignore[misc]
            for replica, share in zip(self.copies, self.shares, strict=True)
        ]
        seed_generators(number)
        before = self._states()
        of_the_run = use(lambda *term: means[group.thread.rank].count(*term))
        try:
            # The default dtype of double precision is that of all threads: it is set here as well.
            with self.context(), group.as_torch_distributed(), preserved_globals(self.module):
                group.run(lambda rank: self._step(rank, batches[rank], number))
        finally:
            use(of_the_run)
        after = self._states()
        self.has_drawn |= not (same_states(before[1:], after[1:]) and before[0].equal(after[0]))
        return self.steps

    def _states(self) -> tuple[Any, ...]:
        """Read the states of all generators, that of the device first."""
        device, states = self.module.device, generator_states()
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else states[2]
        return own, *states

    def _step(self, rank: int, batch: Any, number: int) -> None:
        replica = self.copies[rank]
        if replica.device.type == "cuda":
            torch.cuda.set_device(replica.device)  # each thread has a current device
        with torch.enable_grad():
            with self.context():
                batch = transferred(replica, self.trainer, batch)
                takes = inspect.signature(replica.training_step).parameters
                result: Any = replica.training_step(*[batch, number][: len(takes)])
            loss = result["loss"] if isinstance(result, dict) else result
            if replica.automatic_optimization and loss is not None:
                self.backward(loss)
                self._note(self.named[0])
                replica.zero_grad()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradient of all copies' losses to each one's, as processes average theirs."""
        losses = self.group.meet("a backward pass", loss)
        if self.group.thread.rank == 0:
            earlier = [{name: p.grad for name, p in named.items()} for named in self.named]
            for replica in self.copies:
                replica.zero_grad()
            terms = [loss * share for loss, share in zip(losses, self.shares, strict=True)]
            torch.stack(terms).sum().backward(*args, **kwargs)  # type: ignore[no-untyped-call]
            for name in self.named[0]:
                new = [named[name].grad for named in self.named]
                for named, grads in zip(self.named, earlier, strict=True):
                    added = [gradient for gradient in (grads[name], *new) if gradient is not None]
                    named[name].grad = torch.stack(added).sum(0) if added else None
        self.group.meet("the end of a backward pass")

    def step(self, optimizer: Any, closure: Any = None, **_: Any) -> None:
        """Replace an optimizer's step: run its closure, note gradients, and leave the weights."""
        if closure is not None:
            closure()
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._note({name: p for name, p in self.named[0].items() if id(p) in stepped})

    def _note(self, named: dict[str, nn.Parameter]) -> None:
        """Record the gradients of a step of the first copy; all have the same."""
        self.group.meet("a step of its optimizer")
        if self.group.thread.rank == 0:
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
            self.steps.append({name: gradient.clone() for name, gradient in grads.items()})

    def log(self, rank: int, name: str, value: Any, *_: Any, **settings: Any) -> None:
        """Record a number that a copy logs, in place of ``self.log``."""
        if isinstance(value, (int, float)) or type(value) is Tensor:
            self.logged[rank][name] = float(value), operation(settings), settings.get("batch_size")


def copy_of(module: pl.LightningModule, optimizers: list[Any]) -> tuple[Any, list[Any]]:
    """Copy a module without its trainer; a hook that closes over it closes over the copy."""
    held = [value for part in module.modules() for value in vars(part).values()]
    # Methods that make loaders hold the trainer; graphs of steps that are over cannot be copied.
    memo: dict[int, Any] = {
        id(value): value for name, value in vars(module).items() if name.endswith("_dataloader")
    }
    for value in held:
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    held += [hook for value in held if isinstance(value, dict) for hook in value.values()]
    functions = [one for one in held if isinstance(one, FunctionType) and one.__closure__]
    cells = {id(cell): (cell, CellType()) for one in functions for cell in one.__closure__ or ()}
    for one in functions:
        closure = tuple(cells[id(cell)][1] for cell in one.__closure__ or ())
        arguments = one.__code__, one.__globals__, one.__name__, one.__defaults__, closure
        memo[id(one)] = FunctionType(*arguments)
        memo[id(one)].__kwdefaults__ = one.__kwdefaults__
    memo |= {id(optimizer.state): defaultdict(dict) for optimizer in optimizers}
    copied = copy.deepcopy((module, optimizers), memo)
    for cell, new in cells.values():
        value = cell.cell_contents
        if type(value) in CONTAINERS:
            memo.setdefault(id(value), copy.copy(value))
        new.cell_contents = memo.get(id(value), value)
    return copied


@contextlib.contextmanager
def preserved_globals(module: nn.Module) -> Iterator[None]:
    """Restore numbers, texts and small containers of the module's classes and of their files."""
    classes = {type(part) for part in module.modules()}
    before = [
        (owner, name, value, copy.copy(value))
        for owner in [*classes, *{sys.modules[kind.__module__] for kind in classes}]
        for name, value in list(vars(owner).items())
        if name[:2] != "__"
        and (type(value) in PLAIN or (type(value) in CONTAINERS and len(value) <= MOST_ELEMENTS))
    ]
    try:
        yield
    finally:
        for owner, name, value, content in before:
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
            if isinstance(value, list):
                value[:] = content
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(content)


def transferred(replica: pl.LightningModule, trainer: pl.Trainer, batch: Any) -> Any:
    """Move a batch to its device, by the hooks of the data module or of the copy."""
    batch = trainer.precision_plugin.convert_input(batch)
    data = getattr(trainer, "datamodule", None)
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        owner = data if data is not None and is_overridden(name, data) else replica
        device = (replica.device,) if name == "transfer_batch_to_device" else ()
        batch = getattr(owner, name)(batch, *device, 0)
    return batch
