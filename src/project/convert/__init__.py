"""Turn any training checkpoint into a plain state_dict that loads on a CPU.

`convert(source, output)` is all of it; `scripts/convert_checkpoint.py` is the command. It reads
torch.save's formats, safetensors and torch.distributed.checkpoint folders as data: neither torch
nor the code that the file names is imported.
"""

from .conversion import DTYPES, convert
from .report import Report
from .tensors import CheckpointError

__all__ = ["DTYPES", "CheckpointError", "Report", "convert"]
