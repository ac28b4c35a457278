"""Which GPUs there are, and the choice of the emptiest."""

from harness.machine.choice import num_gpus

__all__ = ["num_gpus"]
