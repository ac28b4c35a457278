"""Turn any training checkpoint into a plain state_dict that loads on a CPU.

`convert(source, output)` is all of it; `scripts/convert_checkpoint.py` is the command. It reads
torch.save's formats, safetensors and torch.distributed.checkpoint folders as data: no code that the
file names is imported, nor torch, unless a run's config.yaml says which network to hold the result
against.
"""

from .conversion import DTYPES, convert
from .report import Report
from .tensors import CheckpointError

__all__ = ["DTYPES", "CheckpointError", "Report", "convert"]
