"""Turn any training checkpoint into a plain state_dict that loads on a CPU.

`convert(source, output)` is all of it; `python -m harness.convert` is the command. It reads
torch.save's formats, safetensors and torch.distributed.checkpoint folders as data: no code that the
file names is imported, nor torch, unless a run's config.yaml names a network of torch.nn or of your
own packages to hold the result against. Of the harness it needs `errors` and `files`.
"""

from .conversion import DTYPES, Report, convert
from .tensors import CheckpointError

__all__ = ["DTYPES", "CheckpointError", "Report", "convert"]
