"""Learning rates over a run, for ``model.scheduler`` in a YAML file."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.errors import UserError


def cosine(
    optimizer: Optimizer, total_steps: int | None = None, warmup: float = 0.05, final: float = 0.0
) -> LambdaLR:
    """Rise in a straight line to each group's own rate, then fall along half a cosine.

    After Loshchilov and Hutter, "SGDR", 2017, without restarts. ``build_optimizers`` fills in
    ``total_steps``, the optimizer steps of the run. ``warmup`` is the share of them in which the
    rate rises; from 1, their number. ``final`` is the share of the rate that is left at the end.
    """
    assert total_steps is not None
    if not 0 <= final <= 1:
        raise UserError(f"model.scheduler.final={final} is a share of the rate: from 0 to 1.")
    num_warmup = warmup if warmup >= 1 else math.ceil(warmup * total_steps)
    if warmup < 0 or num_warmup != int(num_warmup) or num_warmup >= total_steps > 1:
        raise UserError(
            f"model.scheduler.warmup={warmup} must be a share of the run's {total_steps} steps, "
            "such as 0.05, or a whole number below them."
        )

    def factor(step: int) -> float:
        if step < num_warmup:
            return (step + 1) / num_warmup  # the first step is one as well
        done = min(1.0, (step - num_warmup) / max(1, total_steps - num_warmup))
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    schedule = LambdaLR(optimizer, factor)
    # Kept in checkpoints: a run that becomes longer then says that its schedule does as well.
    schedule.total_steps = total_steps  # type: ignore[attr-defined]
    return schedule
