"""Compute steps with a few samples on the run's own module, as training does, and restore it.

In: batches of a few samples. Out: sketches of the gradients that the optimizers would use, and the
logged values. Meanwhile optimizers, schedules, loggers and checkpoints do nothing. Afterwards all
that the step has changed is restored. Next: ``parity_check.py`` compares the passes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from harness.compat import callbacks_of
from harness.compat.logged_values import merge, named_metrics, reduced
from harness.compat.watched_operations import WatchedOperations
from harness.data.randomness import (
    generator_states,
    same_states,
    seed_generators,
)
from harness.kinds import BATCH_NORMS, FRAMEWORKS, package
from harness.parity import mean_over
from harness.parity.collectives import Ranks
from harness.parity.few_samples import Collated, transferred
from harness.parity.global_batches import GlobalBatches
from harness.parity.gradient_sketches import Sketches, record_sketch, sketch_of
from harness.parity.isolation import do_nothing, full_precision, gradients_aside, quiet
from harness.parity.self_log import operation
from harness.parity.snapshot import Snapshot
from harness.strategies.parallel_forward import running_chunk

Logged = dict[str, tuple[float, str, float | None]]  # by name: value, reduction, batch_size


@dataclass
class Result:
    """The gradients and logged values of one pass: steps with some batches in turn."""

    steps: list[list[Sketches]] = field(default_factory=list)  # of optimizer steps, by batch
    logged: list[Logged] = field(default_factory=list)  # by batch
    has_drawn: bool = False
    has_dropout: bool = False
    has_gathered: bool = False  # a step has called a collective
    factor: float = 1.0  # multiplies the gradients of accumulated ``mean_over`` losses
    numbers: dict[Any, Any] = field(default_factory=dict)  # of the module's state after the pass


class Passes:
    """A context manager that computes training or validation steps of the run's module.

    Args:
        trainer: the run's trainer.
        ranks: the run's ranks, which all compute at the same time.

    Raises:
        NotCheckedError: the module holds something that cannot be restored.
    """

    def __init__(self, trainer: pl.Trainer, ranks: Ranks) -> None:
        self.trainer, self.module, self.ranks = trainer, trainer.lightning_module, ranks
        self.global_batches = next(c for c in callbacks_of(trainer) if isinstance(c, GlobalBatches))
        self.plugin = trainer.precision_plugin
        # Mixed precision would hide small differences, so passes compute without it.
        self.is_mixed = isinstance(self.plugin, MixedPrecision)
        self.named = dict(self.module.named_parameters())
        self.result, self.averages = Result(), False
        self.users = [c for c in callbacks_of(trainer) if package(type(c)) not in FRAMEWORKS]
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> "Passes":
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet(self.module.device))
            stack.enter_context(full_precision())
            stack.enter_context(gradients_aside([*self.named.values()]))
            stack.enter_context(self._stubs())
            self.snapshot = Snapshot(
                *(self.module, self.module.hparams, *self.users, *self.trainer.optimizers),
                data=getattr(self.trainer, "datamodule", None),
            )
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()
        vars(self).clear()  # the snapshot and the stubs refer to each other

    @contextlib.contextmanager
    def _stubs(self) -> Iterator[None]:
        """Replace methods that have side effects, such as ``log`` and an optimizer's ``step``."""
        trainer, module = self.trainer, self.module
        trainer_state = dict(vars(trainer))
        wrapped: Any = module.optimizers() if trainer.optimizers else []
        optimizers = [*trainer.optimizers, *(wrapped if isinstance(wrapped, list) else [wrapped])]
        stubs: list[tuple[Any, dict[str, Any]]] = [
            (module, dict.fromkeys(("print", "clip_gradients"), do_nothing)),
            (module, {"log": self._log, "manual_backward": self._manual_backward}),
            (trainer, {"save_checkpoint": do_nothing}),
        ]
        stubs += [(optimizer, {"step": self._stub_step(optimizer)}) for optimizer in optimizers]
        stubs += [(c.scheduler, {"step": do_nothing}) for c in trainer.lr_scheduler_configs]
        stubs += [(callback, {"log": self._log}) for callback in self.users]
        # Lightning's own ``all_gather``: ``Gathering`` replaces it for the run's batches.
        strategy = trainer.strategy
        stubs += [(strategy, {"all_gather": type(strategy).all_gather.__get__(strategy)})]
        batches = self.global_batches
        weight, means, counter = batches.weight, batches.means, mean_over.set_counter(None)
        originals = [(target, {n: vars(target).get(n) for n in new}) for target, new in stubs]
        trainer.loggers = [DummyLogger()]
        try:
            for target, new in stubs:
                vars(target).update(new)
            yield
        finally:
            for target, old in originals:
                for name, value in old.items():
                    vars(target).pop(name, None)
                    vars(target).update({} if value is None else {name: value})
            batches.weight, batches.means = weight, means
            mean_over.set_counter(counter)
            vars(trainer).clear()
            vars(trainer).update(trainer_state)

    def train(
        self,
        batches: Sequence[Collated],
        batch_idx: int,
        weights: Sequence[float],
        as_one: bool,
        seed: int = 0,
    ) -> Result:
        """Compute training steps in turn, and restore the state.

        Args:
            batches: on the host; several are accumulated for one optimizer step.
            batch_idx: the argument for the training step.
            weights: of each batch's gradient, as ``GlobalBatches`` sets them in training.
            as_one: whether this rank computes as if it were the only one.
            seed: seeds the random generators.
        """
        callback, trainer = self.global_batches, self.trainer
        callback.means = mean_over.Means(trainer, lambda: callback.weight)
        callback.means.num_processes = 1 if as_one else callback.means.num_processes
        self.averages = not as_one and self.ranks.size > 1
        num_accumulated = trainer.accumulate_grad_batches
        mean_over.set_counter(callback.means.count)
        try:
            trainer.accumulate_grad_batches = len(batches)
            with self._pass(as_one, seed), torch.enable_grad():
                for collated, weight in zip(batches, weights, strict=True):
                    callback.weight = weight
                    self._step(collated.batch, batch_idx)
            self.result.has_drawn |= any(collated.has_drawn for collated in batches)
            self.result.factor = float(callback.means.factor())
            return self.result
        finally:
            trainer.accumulate_grad_batches = num_accumulated
            mean_over.set_counter(None)
            self._restore()

    def validate(
        self, batches: Sequence[Collated], callbacks: Sequence[pl.Callback], dataloader_idx: int
    ) -> Result:
        """Compute validation steps and the callbacks' hooks after them; restore the state."""
        module, trainer = self.module, self.trainer
        step = module.validation_step
        try:
            with self._pass(as_one=True):
                accepts = [is_param_in_hook_signature(step, n, min_args=i) for i, n in OPTIONAL]
                for collated in batches:
                    self._begin(seed=0)
                    self.result.logged.append({})
                    batch = transferred(module, collated.batch)
                    with self.plugin.val_step_context() if not self.is_mixed else NOTHING:
                        output = step(batch, *[0, dataloader_idx][: sum(accepts)])
                    for callback in callbacks:
                        arguments = (output, batch, 0, dataloader_idx)
                        callback.on_validation_batch_end(trainer, module, *arguments)
            return self.result
        finally:
            self._restore()

    @contextlib.contextmanager
    def _pass(self, as_one: bool, seed: int = 0) -> Iterator[None]:
        """Watch what a pass writes and draws; reset metrics, and put BatchNorm into eval mode."""
        self.result = Result()
        for layer in self.module.modules():
            if isinstance(layer, BATCH_NORMS) and layer.track_running_stats:
                layer.training = False  # ``batch_norm_warning`` warns of BatchNorm
        self._begin(seed)
        states, num_collectives = generator_states(), self.ranks.num_collectives
        watch = WatchedOperations(self.snapshot.before_write, self.ranks.before_collective)
        with self.ranks.as_one(self.trainer) if as_one else self.ranks.together(), watch:
            yield
        # ``watch`` sees draws from torch. Compare the states of Python's and NumPy's generators.
        has_drawn = not same_states(
            (*states[:2], torch.zeros(0)), (*generator_states()[:2], torch.zeros(0))
        )
        self.result.has_drawn = watch.has_drawn or has_drawn
        self.result.has_dropout = watch.has_dropout
        self.result.has_gathered = self.ranks.num_collectives > num_collectives
        if hasattr(self.trainer.strategy, "splitting_calls"):  # each split call may change a number
            self.result.numbers = self.snapshot.numbers()

    def _begin(self, seed: int) -> None:
        for metric in named_metrics(self.module).values():
            metric.reset()
        seed_generators(seed)
        if self.module.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _restore(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None
        self.snapshot.restore()

    def _step(self, batch: Any, batch_idx: int) -> None:
        module = self.module
        self.result.steps.append([])
        self.result.logged.append({})
        with self.plugin.train_step_context() if not self.is_mixed else NOTHING:
            batch = transferred(module, batch)
            accepts_two = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
            result: Any = module.training_step(batch, *[batch_idx] * accepts_two)
        loss = result["loss"] if isinstance(result, dict) else result
        if not module.automatic_optimization or loss is None:
            return
        sketches = Sketches()
        trained = {name: p for name, p in self.named.items() if p.requires_grad}
        # Reduce each gradient to a sketch at once, so that only one is in memory.
        streamed = {} if is_overridden("backward", module) else trained
        handles: list[Any] = []
        for name, parameter in streamed.items():
            hook = partial(record_sketch, name=name, sketches=sketches)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        try:
            self._backward(loss)
        finally:
            for handle in handles:
                handle.remove()
        for name, parameter in trained.items():
            record_sketch(parameter, name, sketches)
        self.result.steps[-1].append(sketches)

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Call ``on_before_backward`` of the user and of ``GlobalBatches``, and then backward."""
        for callback in callbacks_of(self.trainer):
            is_of_user = package(type(callback)) not in FRAMEWORKS
            if is_of_user or callback is self.global_batches:
                callback.on_before_backward(self.trainer, self.module, loss)
        self.module.on_before_backward(loss)
        self.module.backward(loss, *args, **kwargs)

    def _manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._backward(loss, *args, **kwargs)
        if self.averages:  # the step may read the gradients before the optimizer's step
            self.ranks.average({n: p.grad for n, p in self.named.items() if p.grad is not None})

    def _stub_step(self, optimizer: Any) -> Callable[..., Any]:
        """Return a replacement of an optimizer's step: call the closure, and keep sketches."""

        def step(closure: Any = None, **_: Any) -> Any:
            result = None if closure is None else closure()
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if self.averages:
                self.ranks.agree("a step of an optimizer")
            self.result.steps[-1].append(
                {name: sketch_of(p) for name, p in self.named.items() if id(p) in stepped}
            )
            return result

        return step

    def _log(self, name: str, value: Any, *_: Any, **how: Any) -> None:
        """Keep a number that the step logs, in place of ``self.log``."""
        if not isinstance(value, (int, float)) and type(value) is not Tensor:
            return
        number, op, size = float(value), operation(how), how.get("batch_size")
        size = None if size is None else float(size)
        logged, (part, num_before, num_rows) = self.result.logged[-1], running_chunk()
        if part and name in logged:  # a split call logs once for each part
            previous, previous_size = logged[name][0], logged[name][2]
            values = ((previous, num_before), (number, num_rows))
            pairs = [(v * n if op == "mean" else v, float(n)) for v, n in values]
            number = reduced(op, *merge(op, pairs))
            size = size if size is None or previous_size is None else size + previous_size
        logged[name] = number, op, size


NOTHING: Any = contextlib.nullcontext()
OPTIONAL = ((2, "batch_idx"), (3, "dataloader_idx"))  # arguments of a validation_step
