"""What keeps parameters whole while a part of a module computes, and sees what is written then."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import UserError
from harness.shards import has_parts
from harness.upstream.resume_states import num_changes

NUM_COMPARED = 2  # calls of a unit: each norm reads its parameters once


class Root(nn.Module):
    """Makes what is in no unit whole while a method of a module runs, whatever that calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.is_inside = module, False

    def forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the method returns."""
        return method(*args, **kwargs)

    def making_whole(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that may be called from outside of a step as well as in it."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_inside:
                return method(*args, **kwargs)
            self.is_inside = True
            try:
                return self(method, *args, **kwargs)
            finally:
                self.is_inside = False

        return call


def refuse_writes(unit: nn.Module, module: nn.Module) -> None:
    """Refuse what a unit of fsdp writes into its parameters while they are whole.

    It would be lost: the next time they are gathered from the parts, which nobody has written.
    What is written through ``.data`` torch does not count; it is seen in the first calls.

    Args:
        unit: which ``fully_shard`` has been given.
        module: knows the parameters' names.
    """
    before: list[tuple[Tensor, str]] = []
    num_calls = 0

    def state_of(one: Tensor) -> str:
        if num_calls > NUM_COMPARED or not one.is_floating_point():
            return str(num_changes(one))
        norm = torch.linalg.vector_norm(one.detach(), dtype=torch.float64)
        return f"{num_changes(one)} {norm.item()}"

    def look(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        before[:] = [(one, state_of(one)) for one in unit.parameters() if not has_parts(one)]

    def compare(*_: Any) -> None:
        written = {id(one) for one, state in before if state_of(one) != state}
        before.clear()
        if written:
            name = next(name for name, one in module.named_parameters() if id(one) in written)
            raise UserError(
                f"{name} is written in a step, which strategy=fsdp would lose: it is whole for "
                "that time alone.\nWrite it in a hook, such as on_train_batch_start, or use "
                "strategy=ddp."
            )

    unit.register_forward_pre_hook(look)
    unit.register_forward_hook(compare, prepend=True)  # before the parameters are parted again
