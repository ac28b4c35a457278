"""Turn any training checkpoint into a plain state_dict that loads on a CPU.

`convert(source, output)` writes it, and `python -m harness.convert` is the command; `load(source)`
returns it as tensors. Read are torch.save's formats, safetensors and torch.distributed.checkpoint
folders, as data: no code that the file names is imported, nor is torch by `convert`. Of the harness
it needs `errors` and `files`.
"""

from .conversion import DTYPES, Report, convert
from .loading import load
from .tensors import CheckpointError

__all__ = ["DTYPES", "CheckpointError", "Report", "convert", "load"]
