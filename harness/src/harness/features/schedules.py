"""Learning rate schedules over a run, for ``model.scheduler`` in a YAML file."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.errors import UserError


def cosine(
    optimizer: Optimizer, total_steps: int | None = None, warmup: float = 0.05, final: float = 0.0
) -> LambdaLR:
    """Raise the rate linearly to each group's learning rate, then lower it along half a cosine.

    After Loshchilov and Hutter, "SGDR", 2017, without restarts.

    Args:
        optimizer: its groups' learning rates are the largest rates.
        total_steps: optimizer steps of the run, which ``build_optimizers`` fills in.
        warmup: the fraction of the steps in which the rate rises. A value of 1 or more is their
            number.
        final: the fraction of the largest rate that is left at the end.

    Raises:
        UserError: ``warmup`` or ``final`` is out of range.
    """
    assert total_steps is not None
    if not 0 <= final <= 1:
        raise UserError(
            f"model.scheduler.final={final} must be a fraction of the learning rate, from 0 to 1."
        )
    num_warmup = warmup if warmup >= 1 else math.ceil(warmup * total_steps)
    if warmup < 0 or num_warmup != int(num_warmup) or num_warmup >= total_steps > 1:
        raise UserError(
            f"model.scheduler.warmup={warmup} does not fit a run of {total_steps} steps. Use a "
            f"fraction, such as 0.05, or a whole number of steps below {total_steps}."
        )

    def factor(step: int) -> float:
        if step < num_warmup:
            return (step + 1) / num_warmup  # not 0 in the first step
        progress = min(1.0, (step - num_warmup) / max(1, total_steps - num_warmup))
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    schedule = LambdaLR(optimizer, factor)
    # Saved in checkpoints, so that a longer resumed run can warn that its schedule has changed.
    schedule.total_steps = total_steps  # type: ignore[attr-defined]
    return schedule
