"""Turn any training checkpoint into a plain state_dict that loads on a CPU.

`convert(source, output)` writes it to a file, and `python -m harness.convert` is the command.
`load(source)` returns it as tensors. Both read files as data: they import no code that a file
names. `convert` does not import torch either. This package imports only `errors` and `files` of
the library.
"""

from .conversion import Weights, convert, load
from .tensors import CheckpointError

__all__ = ["CheckpointError", "Weights", "convert", "load"]
