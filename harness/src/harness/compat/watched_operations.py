"""Watch each operation of torch during a parity check, and switch dropout off.

In: functions to call before an operation writes, and before a collective. torch's interception of
operations is private, and so is the schema that names the written arguments. Without this file
``parity/parity_passes.py`` fails. Seen in torch 2.6 to 2.13, and tested by
``harness/tests/compat/test_watched_operations.py``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

RUNNING = ("running_mean", "running_var")
SEEDED = torch.Tag.nondeterministic_seeded


class WatchedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Call a function before an operation writes to a tensor, or starts a collective.

    Dropout drops nothing: its mask, and any other tensor of Bernoulli numbers, becomes its mean.

    Args:
        before_write: gets each tensor that an operation is about to write in place.
        before_collective: is called before a collective of ``torch.distributed``.

    Attributes:
        has_dropout: whether an operation would have applied dropout.
        has_drawn: whether an operation has drawn other random numbers.
    """

    def __init__(
        self, before_write: Callable[[Tensor], None], before_collective: Callable[[], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before_write, self.before_collective = before_write, before_collective
        self.has_dropout = self.has_drawn = False

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, without its dropout, after the functions for writes and collectives."""
        kwargs = kwargs or {}
        if func.namespace.strip("_").startswith("c10d"):
            self.before_collective()
        schema, name = func._schema, func._schema.name.removeprefix("aten::")
        if name == "native_dropout":
            self.has_dropout |= args[2] is not False and args[1] > 0
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "native_dropout_backward":
            return args[0].clone()
        for tensor in written_tensors(schema, args, kwargs):
            self.before_write(tensor)
        if name in ("bernoulli_", "bernoulli") and schema.overload_name in ("float", "p"):
            # torch omits the argument if it has the default, 0.5.
            keep = float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
            self.has_dropout |= 0 < keep < 1
            return args[0].fill_(keep) if name == "bernoulli_" else torch.full_like(args[0], keep)
        positions = {argument.name: i for i, argument in enumerate(schema.arguments)}
        position = positions.get("dropout_p", positions.get("dropout"))
        if position is not None:
            name = schema.arguments[position].name
            args, kwargs, probability = without_dropout(args, kwargs, position, name)
            self.has_dropout |= probability > 0
        elif SEEDED in func.tags:
            self.has_drawn = True
        return func(*args, **kwargs)


def has_gradient_hooks(module: nn.Module) -> bool:
    """Return whether a hook sees the gradient of a parameter before ranks average it."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(p, name) for p in module.parameters() for name in hooks)


def written_tensors(schema: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operation with these arguments writes in place."""
    for i, argument in enumerate(schema.arguments):
        # Schemas of norm layers do not declare that they write running statistics.
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        if is_declared or argument.name in RUNNING:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, Tensor):
                    yield tensor


def without_dropout(args: Any, kwargs: Any, index: int, name: str) -> tuple[Any, Any, float]:
    """Return the arguments with a dropout probability of 0, and the original probability."""
    if index < len(args):
        probability = args[index]
        return (*args[:index], probability * 0, *args[index + 1 :]), kwargs, float(probability)
    probability = kwargs.get(name, 0.0)
    return args, kwargs | {name: 0.0} if name in kwargs else kwargs, float(probability)
