"""Random numbers that are the same for any share of a batch, to compare calls of different sizes.

Nothing public sees each operation that draws, or tells whether it has an argument for dropout.
Without it, calls that draw could not be compared. Seen in torch 2.6 to 2.13.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRIVATE = {
    "torch.utils._python_dispatch": "TorchDispatchMode",
    "torch:ops.aten.native_dropout.default": "_schema",
}
MOST_DRAWS = 10_000  # a forward that draws until it likes what comes would never end


def constant_numbers() -> AbstractContextManager[Any]:
    """Replace what is drawn by 0.5, or 0 where it is no fraction; attention drops nothing.

    Raises:
        RuntimeError: when more than ``MOST_DRAWS`` operations have drawn.
    """
    mode: AbstractContextManager[Any] = _ConstantNumbers()  # type: ignore[no-untyped-call]
    return mode


class _ConstantNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    num_draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; one that may draw is looked at before and after."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        drops = {"dropout_p", "dropout"}  # of attention, and of RNNs on GPUs
        args = [0.0 if name in drops else arg for name, arg in zip(names, args, strict=False)]
        kwargs = {name: 0.0 if name in drops else arg for name, arg in kwargs.items()}
        before = _states(kwargs.get("generator"))
        result = func(*args, **kwargs)
        after = _states(kwargs.get("generator"))
        if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
            self.num_draws += 1
            if self.num_draws > MOST_DRAWS:
                raise RuntimeError(f"more than {MOST_DRAWS} operations draw random numbers")
            for leaf in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(leaf, Tensor):
                    leaf.fill_(0.5 if leaf.is_floating_point() else 0)
            if func is torch.ops.aten.native_dropout.default:
                result[0].copy_(args[0])
        return result


def _states(generator: torch.Generator | None) -> list[Tensor]:
    on_gpu = torch.cuda.is_available()
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_gpu else ())]
    return states if generator is None else [*states, generator.get_state()]
