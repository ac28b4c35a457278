"""Convert a checkpoint: open, select, write beside the target, verify, rename.

In: a path and what to take of it. Out: a file and a Report (`convert`), or torch's tensors (`load`,
`opened`).
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError
from harness.files import replacing

from .checkpoint import Checkpoint, stem_of, whole
from .choose import Selection, select
from .names import printable
from .stream import check, stream
from .tensors import CheckpointError, Record, Tensor, target_dtype
from .write import verify, write_pt, write_safetensors

if TYPE_CHECKING:
    import torch

_WRITERS = {".pt": write_pt, ".pth": write_pt, ".safetensors": write_safetensors}
_MIN_RESULT, _MAX_EXPANSION = 100_000_000, 16  # bytes that any file may lead to; times the source
DTYPES = ("keep", "float32", "float16", "bfloat16")


@dataclass(kw_only=True)
class Report(Selection):
    """What was taken, renamed, dropped and verified; `str` says it in a few lines."""

    source: Path
    output: Path
    kind: str  # the source's format
    dtype: str  # that floating tensors become
    verified: str = ""  # what the new file was compared with; nothing in a dry run

    def __str__(self) -> str:
        tensors = self.tensors.values()
        types = Counter(target_dtype(tensor, self.dtype) for tensor in tensors)
        counts = ", ".join(f"{num} {dtype}" for dtype, num in types.items())
        megabytes = sum(tensor.num_bytes for tensor in tensors) / 1e6
        renamed = [f"{old} -> {new}" for new, old in self.sources.items() if old != new]
        lines = {
            "took": f"{counts}, {megabytes:,.1f} MB, from {self.key} ({self.kind})",
            "renamed": f"{len(renamed)}, such as {renamed[0]}" if renamed else "nothing",
            "left out": ", ".join(self.left_out),
            "dropped": ", ".join(self.dropped) or "nothing",
            "verified": self.verified,
            "note": "; ".join(self.notes),
            "wrote" if self.verified else "would be": str(self.output),
        }
        if self.left_out:
            lines["left out"] += ": of the module around the network; the file alone lacks them"
        texts = (f"  {name:8}  {text}" for name, text in lines.items() if text)
        return "\n".join(map(printable, [str(self.source), *texts]))

    def listing(self) -> str:
        """Return a line for each tensor."""
        width = max(len(printable(name)) for name in self.tensors)
        return "\n".join(
            f"  {printable(name):{width}}  {target_dtype(tensor, self.dtype)} {tensor.shape}"
            f"  <- {printable(self.sources[name])}"
            for name, tensor in self.tensors.items()
        )


@dataclass
class Weights:
    """The weights in an open checkpoint; no byte of them is read before `read`."""

    checkpoint: Checkpoint
    chosen: Selection
    _values: dict[Tensor, "torch.Tensor"] = field(default_factory=dict)
    _checked: set[Record] = field(default_factory=set)

    def read(self, names: Iterable[str]) -> dict[str, "torch.Tensor"]:
        """Read some of them, each byte once; names of the same tensor share its memory.

        Raises:
            CheckpointError: the file is damaged.
        """
        tensors = {name: self.chosen.tensors[name] for name in names}
        self.check_size({*tensors.values()})
        for name, tensor in tensors.items():
            if tensor not in self._values:
                self._values[tensor] = self._read_one(tensor, name)
        return {name: self._values[tensor] for name, tensor in tensors.items()}

    def _read_one(self, tensor: Tensor, name: str) -> "torch.Tensor":
        import torch

        value = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        flat: Any = value.reshape(-1)  # the same memory
        buffer = memoryview(flat.view(torch.uint8).numpy() if tensor.numel else b"")
        position, crc = 0, 0
        for chunk in stream(tensor, tensor.dtype, name):
            buffer[position : position + len(chunk)] = chunk
            position += len(chunk)
            crc = zlib.crc32(chunk, crc)
        if tensor.stated_crc is None and tensor.record not in self._checked:
            check(tensor.record, name)
            self._checked.add(tensor.record)
        if tensor.stated_crc not in (None, crc):
            raise CheckpointError(f"damaged: {name} does not match its checksum; copy it again")
        return value

    def check_size(self, tensors: Iterable[Tensor]) -> None:
        """Refuse to make more of a file than its size explains, as of expanded views."""
        # What a view passes over is read as well, but that is faster.
        cost = sum(max(t.num_bytes, t.span * t.itemsize // 16) for t in tensors)
        if cost > _MIN_RESULT + _MAX_EXPANSION * self.checkpoint.num_bytes:
            raise CheckpointError(f"its size does not explain {cost / 1e9:,.1f} GB of weights")


@contextmanager
def opened(
    source: str | Path,
    *,
    key: str | None = None,
    prefix: str = "auto",
    ema: bool = True,
    keep_module: bool = False,
) -> Iterator[Weights]:
    """Open a checkpoint and find its weights; arguments as of ``convert``.

    With `keep_module` the network has a child called ``module``, which is no wrapper.

    Raises:
        UserError: there is no such file.
        CheckpointError: it is none, is damaged, holds no weights without doubt, or changed
            while the block read it.
    """
    source = whole(source)
    try:
        with Checkpoint(source) as checkpoint:
            root, budget = checkpoint.root, checkpoint.budget
            yield Weights(checkpoint, select(root, key, prefix, ema, keep_module, budget))
            checkpoint.check_unchanged()
    except CheckpointError as error:
        raise CheckpointError(printable(f"{source}: {error}")) from error


def load(source: str | Path, **options: Any) -> dict[str, "torch.Tensor"]:
    """Read the weights of a checkpoint as a plain state_dict of CPU tensors, and write nothing.

    Nothing in the file is executed. Memory is taken once for the weights. Options and errors are
    those of ``opened``.
    """
    with opened(source, **options) as weights:
        return weights.read(weights.chosen.tensors)


def default_output(source: Path) -> Path:
    """Return where the weights go if nobody says."""
    return source.with_name(f"{stem_of(source)}.weights.pt")


def convert(
    source: str | Path,
    output: str | Path | None = None,
    *,
    dtype: str = "keep",
    key: str | None = None,
    prefix: str = "auto",
    ema: bool = True,
    force: bool = False,
    dry_run: bool = False,
) -> Report:
    """Write the weights in a checkpoint as a plain state_dict of CPU tensors.

    Args:
        source: a file; a run's folder; or shards: their folder, their index, or one beside it.
        output: ends in .pt, .pth or .safetensors; by default `<stem>.weights.pt` beside the source.
        dtype: what floating tensors become: keep, float32, float16 or bfloat16.
        key: the entry of the file to take, dotted where it is nested, "" for the whole; by
            default the usual ones.
        prefix: the submodule that is the network, "" for the whole, "auto" to find it.
        ema: prefer averaged weights where there are some.
        force: replace an existing output.
        dry_run: write nothing.

    Raises:
        UserError: the arguments cannot be followed.
        CheckpointError: the source cannot be converted.
        OSError: the system refuses to read or write.
    """
    source = whole(source)
    output = Path(output) if output else default_output(source)
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not one of {', '.join(DTYPES)}.")
    if output.suffix not in _WRITERS:
        raise UserError(f"{output} must end in one of {', '.join(_WRITERS)}.")
    if output.exists() and output.samefile(source):
        raise UserError(f"{output} is the source; name another output.")
    if output.exists() and not (force or dry_run):
        raise UserError(f"{output} exists; --force replaces it.")
    with opened(source, key=key, prefix=prefix, ema=ema) as weights:
        kind, chosen = weights.checkpoint.kind, vars(weights.chosen)
        report = Report(**chosen, source=source, output=output, kind=kind, dtype=dtype)
        if not dry_run:
            _write(weights, report, force)
        return report


def _write(weights: Weights, report: Report, force: bool) -> None:
    tensors, output, dtype = report.tensors, report.output, report.dtype
    is_shared = output.suffix != ".safetensors"
    weights.check_size({*tensors.values()} if is_shared else tensors.values())
    with replacing(output, is_forced=force) as file:
        checksums = _WRITERS[output.suffix](file, tensors, dtype)
        file.flush()
        with Checkpoint(Path(file.name)) as copy:
            verify(tensors, dtype, checksums, copy.root)
        weights.checkpoint.check_unchanged()
    has_checksums = all(tensor.record.crc is not None for tensor in tensors.values())
    no_checksums = "the copy, byte for byte; the source states no checksums"
    report.verified = "every byte" if has_checksums else no_checksums
