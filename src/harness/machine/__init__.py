"""Which GPUs there are, which of them CUDA shows, and the choice of the emptiest."""

from harness.machine.visible import num_gpus

__all__ = ["num_gpus"]
