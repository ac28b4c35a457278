"""Which GPUs and cores there are, and the choice of the emptiest."""

from harness.machine.gpus import num_gpus

__all__ = ["num_gpus"]
