"""Batches that are too small for the processes that share them, refused without torch."""

from harness.errors import UserError


def check_batch_size(
    batch_size: int,
    num_processes: int,
    num_micro_batches: int = 1,
    setting: str = "data.batch_size",
) -> None:
    """Refuse a global batch that leaves a process without a sample.

    Args:
        batch_size: samples of a step.
        num_processes: share it.
        num_micro_batches: batches that each of them accumulates.
        setting: where the user has set it.
    """
    least = num_processes * num_micro_batches
    if batch_size < least:
        each = f" with {num_micro_batches} batches each per step" if num_micro_batches > 1 else ""
        raise UserError(
            f"{setting}={batch_size} cannot be shared by {num_processes} processes{each}: "
            "it counts the samples of one optimizer step over all of them.\n"
            f"Use {setting}={least} or more."
        )
