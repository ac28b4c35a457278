"""Convert a checkpoint: open, select, write beside the target, verify, rename.

In: a path and what to take of it. Out: Weights, with a file (`convert`) or without (`opened`), or
torch's tensors (`load`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, printable
from harness.files import replacing

from .checkpoint import Checkpoint, whole
from .choose import Selection, select
from .tensors import CheckpointError, Tensor, check, stream
from .write import verify, write_pt, write_safetensors

if TYPE_CHECKING:
    import torch

_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")  # of checkpoints
_WRITERS = {".pt": write_pt, ".pth": write_pt, ".safetensors": write_safetensors}
_MIN_RESULT, _MAX_EXPANSION = 100_000_000, 16  # bytes that any file may lead to; times the source


@dataclass(kw_only=True)
class Weights(Selection):
    """The weights in an open checkpoint; no byte of them is read before `read`.

    `str` says in a few lines what was taken, renamed, left out and verified.
    """

    checkpoint: Checkpoint
    output: Path | None = None  # the file that `convert` writes
    verified: str = ""  # what that was compared with; nothing in a dry run

    def __str__(self) -> str:
        types = Counter(tensor.dtype for tensor in self.tensors.values())
        counts = ", ".join(f"{num} {dtype}" for dtype, num in types.items())
        megabytes = sum(tensor.num_bytes for tensor in self.tensors.values()) / 1e6
        renamed = [f"{old} -> {new}" for new, old in self.sources.items() if old != new]
        rows = {
            "took": f"{counts}, {megabytes:,.1f} MB, from {self.key} ({self.checkpoint.kind})",
            "renamed": f"{len(renamed)}, such as {renamed[0]}" if renamed else "nothing",
            "left out": ", ".join(self.left_out) or "nothing",
            "verified": self.verified,
            "note": "; ".join(self.notes),
            "wrote" if self.verified else "would be": str(self.output),
        }
        texts = (f"  {name:8}  {text}" for name, text in rows.items() if text)
        return "\n".join(map(printable, [str(self.checkpoint.path), *texts]))

    def listing(self) -> str:
        """Return a line for each tensor."""
        return "\n".join(
            printable(f"  {name}  {tensor.dtype} {tensor.shape}  <- {self.sources[name]}")
            for name, tensor in self.tensors.items()
        )

    def read(self, names: Iterable[str]) -> dict[str, "torch.Tensor"]:
        """Read some of them; names of the same tensor share its memory.

        Raises:
            CheckpointError: the file is damaged.
        """
        names = [*names]
        name_of = {self.tensors[name]: name for name in names}
        values = dict(zip(name_of, self.each(name_of.values()), strict=True))
        return {name: values[self.tensors[name]] for name in names}

    def each(self, names: Iterable[str]) -> Iterator["torch.Tensor"]:
        """Read some of them one after another, once the checksums of all were found to hold.

        Raises:
            CheckpointError: the file is damaged.
        """
        names = [*names]
        self.check_size({self.tensors[name] for name in names})
        for name in names:
            check(self.tensors[name].record, name)
        yield from (_read_one(self.tensors[name]) for name in names)

    def check_size(self, tensors: Iterable[Tensor]) -> None:
        """Refuse to make more of a file than its size explains, as of expanded views."""
        # What a view passes over is read as well, but that is faster.
        cost = sum(max(t.num_bytes, t.span * t.itemsize // 16) for t in tensors)
        if cost > _MIN_RESULT + _MAX_EXPANSION * self.checkpoint.num_bytes:
            raise CheckpointError(f"its size does not explain {cost / 1e9:,.1f} GB of weights")


def _read_one(tensor: Tensor) -> "torch.Tensor":
    import torch

    dtype, content = getattr(torch, tensor.dtype), bytearray()
    for chunk in stream(tensor):
        content += chunk
    if not content:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(tensor.shape)


@contextmanager
def opened(
    source: str | Path, *, key: str | None = None, prefix: str = "auto", ema: bool = True
) -> Iterator[Weights]:
    """Open a checkpoint and find its weights; the arguments are options of the command.

    `prefix` is the submodule that is the network, "" for the whole, "auto" to find it; `key` is the
    entry that holds the weights, "" for the whole file; with `ema` averages are preferred.

    Raises:
        UserError: there is no such file.
        CheckpointError: it cannot be read, holds no weights without doubt, or changes meanwhile.
    """
    source = whole(source)
    try:
        with Checkpoint(source) as checkpoint:
            chosen = select(checkpoint.root, key, prefix, ema, checkpoint.budget)
            yield Weights(**vars(chosen), checkpoint=checkpoint)
            checkpoint.check_unchanged()
    except CheckpointError as error:
        raise CheckpointError(printable(f"{source}: {error}")) from error


def load(source: str | Path, **options: Any) -> dict[str, "torch.Tensor"]:
    """Read the weights of a checkpoint as a plain state_dict of CPU tensors, and write nothing.

    Options and errors are those of ``opened``.
    """
    with opened(source, **options) as weights:
        return weights.read(weights.tensors)


def default_output(source: Path) -> Path:
    """Return where the weights go if nobody says; the dots in `loss=0.12` are no suffix."""
    stem = source.stem if source.suffix in _SUFFIXES else source.name
    return source.with_name(f"{stem}.weights.pt")


def convert(
    source: str | Path,
    output: str | Path | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
    **options: Any,
) -> Weights:
    """Write the weights in a checkpoint as a plain state_dict of CPU tensors.

    With `force` an existing output is replaced; with `dry_run` nothing is written. Other options
    are those of `opened`.

    Raises:
        UserError: the arguments cannot be followed.
        CheckpointError: the source cannot be converted.
        OSError: the system refuses to read or write.
    """
    source = whole(source)
    output = Path(output) if output else default_output(source)
    if output.suffix not in _WRITERS:
        raise UserError(f"{output} must end in one of {', '.join(_WRITERS)}.")
    if output.resolve() == source.resolve():
        raise UserError(f"{output} is the source; name another output.")
    if output.exists() and not (force or dry_run):
        raise UserError(f"{output} exists; --force replaces it.")
    with opened(source, **options) as weights:
        weights.output = output
        if not dry_run:
            _write(weights, output, force)
        return weights


def _write(weights: Weights, output: Path, force: bool) -> None:
    tensors, is_shared = weights.tensors, output.suffix != ".safetensors"
    weights.check_size({*tensors.values()} if is_shared else tensors.values())
    with replacing(output, is_forced=force) as file:
        checksums = _WRITERS[output.suffix](file, tensors)
        file.flush()
        with Checkpoint(Path(file.name)) as copy:
            verify(tensors, checksums, copy.root)
        weights.checkpoint.check_unchanged()
    weights.verified = "the copy with its source, and that with the checksums that it states"
