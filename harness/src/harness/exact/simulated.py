"""Copies of a module that run a step as the processes of a run do, inside of one process.

Each copy has a thread, and one thread runs at a time: until its step asks for what only all copies
have together (a gather, a sum, a backward pass). When all have asked, they are answered at once,
so what is gathered keeps its graph.
"""

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from harness.data.randomness import (
    generator_states,
    restore_generators,
    same_states,
    seed_generators,
)
from harness.exact import stand_ins
from harness.exact.gradients import Gradients
from harness.exact.means import Means, use
from harness.exact.seeded_steps import dropouts
from harness.strategies.sync_batch_norm import BATCH_NORMS
from harness.upstream.fixed_draws import FixedDraws

ENDED = "the end of its step"


class UnequalError(Exception):
    """One copy asks for something else than another one: processes would wait for ever."""


class UnequalShapesError(Exception):
    """What is gathered has other shapes in shares of other sizes."""


class Copies:
    """Run steps on copies of a module, each with its share of the batch.

    Args:
        module: belongs to a trainer, and is not changed.
        sizes: the samples that each copy gets.
        prepare: is given each copy, and its number of samples, such as to split its calls.
        is_exact: mixed precision is left out, for its rounding hides small differences.
        fixes_draws: see ``FixedDraws``.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        sizes: Sequence[int],
        prepare: Callable[[pl.LightningModule, int], object] = stand_ins.nothing,
        is_exact: bool = False,
        fixes_draws: bool = False,
    ) -> None:
        self.trainer, self.sizes = module.trainer, sizes
        is_mixed = is_exact and isinstance(self.trainer.precision_plugin, MixedPrecision)
        own_context = self.trainer.precision_plugin.train_step_context
        self.context = contextlib.nullcontext if is_mixed else own_context
        self.precision = "" if is_mixed else str(self.trainer.precision)  # of mixed ones
        self.shares = [size / sum(sizes) for size in sizes]
        self.shared = stand_ins.Remembered(module)
        self.logged: list[dict[str, Any]] = [{} for _ in sizes]
        self.copies = [self._copied(module, rank) for rank in range(len(sizes))]
        self.named = [
            {name: p for name, p in copied.named_parameters() if p.requires_grad}
            for copied in self.copies
        ]
        for copied, size in zip(self.copies, sizes, strict=True):
            prepare(copied, size)
        self.rank = 0  # whose step runs
        self.has_drawn = False  # random numbers, in any step
        self.draws = FixedDraws() if fixes_draws else contextlib.nullcontext()
        self.has_unfixed = False  # numbers that are other ones in parts
        self.steps: list[Gradients] = []  # what optimizers are asked to step with

    def run(self, batches: Sequence[Any], number: int) -> list[Gradients]:
        """The gradients of each optimizer's step that a training step makes.

        Raises:
            UnequalError: one copy steps or gathers where another does not.
        """
        self.steps = []
        self.shared.put_back()
        means = [
            Means(copied.trainer, partial(share.__mul__, len(self.shares)))
            for copied, share in zip(self.copies, self.shares, strict=True)
        ]
        seed_generators(number)
        states = [generator_states()] * len(means)
        contents = [self.shared.contents() for _ in means]
        threads = [
            _Thread(partial(self._step, rank, batch, number)) for rank, batch in enumerate(batches)
        ]
        answers: list[Any] = [None] * len(threads)
        group = stand_ins.simulated_group(len(threads), lambda: self.rank, self.everyones)
        # Threads leave their contexts in another order: the default dtype is put back here.
        with self.context(), group:
            while True:
                asked = []
                for self.rank, thread in enumerate(threads):
                    restore_generators(states[self.rank])
                    self.shared.fill(contents[self.rank])
                    of_the_run = use(means[self.rank].count)
                    asked.append(thread.resume(answers[self.rank]))
                    use(of_the_run)
                    before, states[self.rank] = states[self.rank], generator_states()
                    self._note_draws(before, states[self.rank])
                    contents[self.rank] = self.shared.contents()
                kinds = list(dict.fromkeys(what for what, *_ in asked))
                errors = [value for *_, value in asked if isinstance(value, Exception)]
                if errors or len(kinds) > 1:
                    for thread in threads:
                        thread.end()
                    raise errors[0] if errors else UnequalError(", another to ".join(kinds))
                if kinds == [ENDED]:
                    return self.steps
                answers = asked[0][1]([value for *_, value in asked])

    def _step(self, rank: int, batch: Any, number: int) -> None:
        copied = self.copies[rank]
        with torch.enable_grad(), self.context(), self.draws:
            batch = transferred(copied, self.trainer, batch)
            takes = inspect.signature(copied.training_step).parameters
            result: Any = copied.training_step(*[batch, number][: len(takes)])
        loss = result["loss"] if isinstance(result, dict) else result
        if copied.automatic_optimization and loss is not None:
            self.backward(loss)
            self.note(self.named[rank])
            for parameter in self.named[rank].values():
                parameter.grad = None

    def _note_draws(self, before: Any, after: Any) -> None:
        self.has_drawn |= not same_states(before, after)
        of_python = same_states((*before[:2], after[2]), after)
        is_fixed = isinstance(self.draws, FixedDraws) and not self.draws.has_missed and of_python
        self.has_unfixed |= self.has_drawn and not is_fixed

    def ask(self, what: str, value: Any, answer: Callable[[list[Any]], list[Any]]) -> Any:
        """Wait until all copies ask for the same; ``answer`` has an answer for each of them."""
        thread = threading.current_thread()
        assert isinstance(thread, _Thread)
        return thread.ask(what, answer, value)

    def everyones(self, value: Any) -> list[Any]:
        """What each copy has given.

        Raises:
            UnequalShapesError: tensors of several shapes.
        """

        def answer(values: list[Any]) -> list[Any]:
            if len({getattr(one, "shape", None) for one in values}) > 1:
                return [UnequalShapesError()] * len(values)
            return [values] * len(values)

        found: list[Any] = self.ask("a collective operation", value, answer)
        return found

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradient of all copies' losses to each one's, as processes average theirs."""

        def answer(losses: list[Tensor]) -> list[None]:
            before = [{name: p.grad for name, p in named.items()} for named in self.named]
            for named in self.named:
                for parameter in named.values():
                    parameter.grad = None
            terms = [loss * share for loss, share in zip(losses, self.shares, strict=True)]
            torch.stack(terms).sum().backward(*args, **kwargs)  # type: ignore[no-untyped-call]
            for name in self.named[0]:
                new = [named[name].grad for named in self.named]
                for named, grads in zip(self.named, before, strict=True):
                    added = [gradient for gradient in (grads[name], *new) if gradient is not None]
                    named[name].grad = torch.stack(added).sum(0) if added else None
            return [None] * len(losses)

        self.ask("a backward pass", loss, answer)

    def note(self, named: dict[str, nn.Parameter]) -> None:
        """Take down the gradients of an optimizer's step, which are the same in all copies."""

        def answer(values: list[Any]) -> list[None]:
            self.steps.append(gradients_of(named))
            return [None] * len(values)

        self.ask("a step of its optimizer", None, answer)

    def _copied(self, module: pl.LightningModule, rank: int) -> pl.LightningModule:
        copied: Any = copy_of(module)
        copied.trainer = stand_ins.Trainer(self.trainer, rank, len(self.shares), self.everyones)
        for _ in dropouts(copied, switch_off=True):
            pass
        for part in copied.modules():
            if isinstance(part, BATCH_NORMS) and part.track_running_stats:
                part.eval()  # those of a share are other ones, which has a line of its own
        named = dict(copied.named_parameters())
        # Of the run's own module, whose parameters its optimizers have.
        names = {id(p): n for n, p in self.trainer.lightning_module.named_parameters()}
        optimizers = [
            stand_ins.Optimizer(one, names, named, self.note) for one in self.trainer.optimizers
        ]
        num_schedules = len(self.trainer.lr_scheduler_configs)
        methods = stand_ins.methods_of_a_run(optimizers, num_schedules, self.logged[rank])
        vars(copied).update(methods, manual_backward=self.backward)
        return copied  # type: ignore[no-any-return]


def copy_of(module: pl.LightningModule) -> pl.LightningModule:
    """A copy without the trainer, which the methods that make the loaders hold as well."""
    shared = {id(v): v for name, v in vars(module).items() if name.endswith("_dataloader")}
    graphs = {  # of steps that are over; they cannot be copied
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(module, shared | graphs)


def gradients_of(named: dict[str, nn.Parameter]) -> Gradients:
    """The gradients of parameters, zero where there is none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}


def transferred(copied: pl.LightningModule, trainer: pl.Trainer, batch: Any) -> Any:
    """A batch on its device, by the hooks of the data module or of the copy."""
    batch = trainer.precision_plugin.convert_input(batch)
    data = getattr(trainer, "datamodule", None)
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        owner = data if data is not None and is_overridden(name, data) else copied
        device = (copied.device,) if name == "transfer_batch_to_device" else ()
        batch = getattr(owner, name)(batch, *device, 0)
    return batch


class _Thread(threading.Thread):
    """Runs a function from question to question."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.function, self.has_ended = function, False
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.questions: SimpleQueue[tuple[str, Any, Any]] = SimpleQueue()
        self.start()

    def run(self) -> None:
        """Begin when it is resumed; end with a question that has no answer."""
        error = None
        self.answers.get()
        try:
            self.function()
        except Exception as raised:
            error = raised
        self.has_ended = True
        self.questions.put((ENDED, None, error))

    def ask(self, what: str, answer: Any, value: Any) -> Any:
        """Wait for an answer; an exception is raised here."""
        self.questions.put((what, answer, value))
        answered = self.answers.get()
        if isinstance(answered, Exception):
            raise answered
        return answered

    def resume(self, answer: Any) -> tuple[str, Any, Any]:
        """Let it run on until it asks."""
        self.answers.put(answer)
        return self.questions.get()

    def end(self) -> None:
        """Let it run no further."""
        while not self.has_ended:
            self.resume(UnequalError())
        self.join()
