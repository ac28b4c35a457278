"""Turn any training checkpoint into a plain state_dict that loads on a CPU.

`convert(source, output)` writes it, and `python -m harness.convert` is the command; `load(source)`
returns it as tensors. Files are read as data: no code that they name is imported, and neither is
torch by `convert`. Of the harness this package needs `errors` and `files` alone.
"""

from .conversion import Weights, convert, load
from .tensors import CheckpointError

__all__ = ["CheckpointError", "Weights", "convert", "load"]
