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
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.errors import UserError
from harness.files import replacing

from .checkpoint import Checkpoint, stem_of, whole
from .choose import Selection, select
from .names import printable, quoted
from .stream import check, stream
from .tensors import CheckpointError, Record, Tensor, target_dtype
from .write import verify as verify_copy
from .write import write_pt, write_safetensors

if TYPE_CHECKING:
    import torch

_WRITERS = {".pt": write_pt, ".pth": write_pt, ".safetensors": write_safetensors}
DTYPES = ("keep", "float32", "float16", "bfloat16")


class Entry(NamedTuple):
    """One tensor of the result, and its name in the source."""

    source: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Report:
    """What was taken, renamed, dropped and verified; `str` says it in a few lines."""

    source: str  # the checkpoint
    output: str  # the new file
    kind: str  # the source's format
    key: str  # the entry of the source that held the weights
    tensors: dict[str, Entry]  # by their new names
    num_bytes: int  # of the tensors that are taken, as they are in the source
    left_out: list[str]  # other weights of the module that holds the network
    dropped: list[str]  # what else the source held
    notes: list[str]  # what was guessed, and the option that decides otherwise
    verified: str = "nothing"  # what the result was compared with
    is_written: bool = False  # not after a dry run

    def __str__(self) -> str:
        types = Counter(entry.dtype for entry in self.tensors.values())
        counts = ", ".join(f"{num} {dtype}" for dtype, num in types.items())
        renamed = [f"{e.source} -> {new}" for new, e in self.tensors.items() if e.source != new]
        lines = {
            "took": f"{counts}, {self.num_bytes / 1e6:,.1f} MB, from {self.key} ({self.kind})",
            "renamed": f"{len(renamed)}, such as {renamed[0]}" if renamed else "nothing",
            "left out": ", ".join(self.left_out),
            "dropped": ", ".join(self.dropped) or "nothing",
            "verified": self.verified,
            "note": "; ".join(self.notes),
            "wrote" if self.is_written else "would be": self.output,
        }
        if self.left_out:
            lines["left out"] += ": of the module around the network; the file alone lacks them"
        texts = (f"  {name:8}  {text}" for name, text in lines.items() if text)
        return "\n".join(map(printable, [self.source, *texts]))

    def listing(self) -> str:
        """Return a line for each tensor."""
        width = max(len(printable(name)) for name in self.tensors)
        return "\n".join(
            f"  {printable(name):{width}}  {e.dtype} {e.shape}  <- {printable(e.source)}"
            for name, e in self.tensors.items()
        )


@dataclass
class Weights:
    """The weights in an open checkpoint; no byte of them is read before `read`."""

    checkpoint: Checkpoint
    chosen: Selection
    _values: dict[Any, "torch.Tensor"] = field(default_factory=dict)
    _checked: set[Record] = field(default_factory=set)

    def read(self, names: Iterable[str]) -> dict[str, "torch.Tensor"]:
        """Read some of them, each byte once; names of the same weights share their memory.

        Raises:
            CheckpointError: the file is damaged.
        """
        tensors = {name: self.chosen.tensors[name] for name in names}
        for name, tensor in tensors.items():
            if tensor.view not in self._values:
                try:
                    self._values[tensor.view] = self._read_one(tensor, name)
                except CheckpointError as error:
                    raise CheckpointError(f"{name}: {error}") from error
        return {name: self._values[tensor.view] for name, tensor in tensors.items()}

    def _read_one(self, tensor: Tensor, name: str) -> "torch.Tensor":
        import torch

        value = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        flat: Any = value.reshape(-1)  # the same memory
        buffer = memoryview(flat.view(torch.uint8).numpy() if tensor.numel else b"")
        position, crc = 0, 0
        for chunk in stream(tensor, tensor.dtype):
            buffer[position : position + len(chunk)] = chunk
            position += len(chunk)
            crc = zlib.crc32(chunk, crc)
        if tensor.stated_crc not in (None, crc):
            raise CheckpointError("damaged: it does not match its checksum; copy the file again")
        for record in {*tensor.records} - self._checked if tensor.stated_crc is None else ():
            check(record, name)
            self._checked.add(record)
        return value


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
            yield Weights(
                checkpoint,
                select(checkpoint.root, key, prefix, ema, keep_module, checkpoint.budget),
            )
            checkpoint.check_unchanged()
    except CheckpointError as error:
        raise CheckpointError(printable(f"{source}: {error}")) from error


def load(
    source: str | Path,
    *,
    key: str | None = None,
    prefix: str = "auto",
    ema: bool = True,
    keep_module: bool = False,
) -> dict[str, "torch.Tensor"]:
    """Read the weights of a checkpoint as a plain state_dict of CPU tensors, and write nothing.

    Nothing in the file is executed. Memory is taken once for the weights. Arguments and errors are
    those of ``opened``.
    """
    with opened(source, key=key, prefix=prefix, ema=ema, keep_module=keep_module) as weights:
        tensors = weights.chosen.tensors
        num_bytes = sum({tensor.view: tensor.num_bytes for tensor in tensors.values()}.values())
        if num_bytes > weights.checkpoint.max_result:
            raise CheckpointError(
                f"{num_bytes / 1e9:,.1f} GB would be made of it, which its size does not "
                "explain (expanded views?)"
            )
        return weights.read(tensors)


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
    verify: bool = True,
    force: bool = False,
    dry_run: bool = False,
) -> Report:
    """Write the weights in a checkpoint as a plain state_dict of CPU tensors.

    Args:
        source: a file, a torch.distributed.checkpoint folder, or sharded files: their folder,
            their index, or one of them beside the index.
        output: ends in .pt, .pth or .safetensors; by default `<stem>.weights.pt` beside the source.
        dtype: what floating tensors become: keep, float32, float16 or bfloat16.
        key: the entry of the file to take, dotted where it is nested, "" for the whole; by
            default the usual ones.
        prefix: the submodule that is the network, "" for the whole, "auto" to find it.
        ema: prefer averaged weights where there are some.
        verify: compare the new file with the source before it gets its name.
        force: replace an existing output.
        dry_run: write nothing.

    Raises:
        UserError: the arguments cannot be followed.
        CheckpointError: the source cannot be converted.
        OSError: the system refuses to read or write.
    """
    source = whole(source)
    output = Path(output) if output else default_output(source)
    _check_arguments(source, output, dtype, force or dry_run)
    try:
        with opened(source, key=key, prefix=prefix, ema=ema) as weights:
            checkpoint, chosen = weights.checkpoint, weights.chosen
            if output.exists() and checkpoint.is_read_from(output):
                raise UserError(f"{output} is the source or a part of it; name another output.")
            entries = {
                new: Entry(chosen.sources[new], target_dtype(tensor, dtype), tensor.shape)
                for new, tensor in chosen.tensors.items()
            }
            num_bytes = sum(tensor.num_bytes for tensor in chosen.tensors.values())
            report = Report(
                str(source),
                str(output),
                checkpoint.kind,
                chosen.key,
                entries,
                num_bytes,
                chosen.left_out,
                chosen.dropped,
                chosen.notes,
            )
            if not dry_run:
                _write(weights, output, dtype, verify, force, report)
            return report
    except FileExistsError as error:
        raise UserError(f"{output} exists, since a moment ago; --force replaces it.") from error


def _write(
    weights: Weights, output: Path, dtype: str, verify: bool, force: bool, report: Report
) -> None:
    tensors = weights.chosen.tensors
    with replacing(output, is_forced=force) as file:
        max_bytes = weights.checkpoint.max_result
        written = _WRITERS[output.suffix](file, tensors, dtype, max_bytes)
        file.flush()
        if verify:
            with Checkpoint(Path(file.name)) as copy:
                verify_copy(written, copy.root)
            records = (record for tensor in tensors.values() for record in tensor.records)
            has_checksums = all(record.crc is not None for record in records)
            no_checksums = "the copy, byte for byte; the source states no checksums"
            report.verified = "every byte" if has_checksums else no_checksums
        weights.checkpoint.check_unchanged()
    report.is_written = True


def _check_arguments(source: Path, output: Path, dtype: str, force: bool) -> None:
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not one of {', '.join(DTYPES)}.")
    if output.is_dir():
        better = quoted(output / f"{stem_of(source)}.pt")
        raise UserError(f"{output} is a folder; -o {better} names a file in it.")
    if output.suffix not in _WRITERS:
        raise UserError(f"{output} must end in one of {', '.join(_WRITERS)}.")
    if not output.parent.is_dir():
        raise UserError(f"{output.parent} is not a folder; create it first.")
    if (output.parent / ".metadata").is_file():
        raise UserError(f"{output} is inside the checkpoint {output.parent}; name another output.")
    if output.exists() and not force:
        raise UserError(f"{output} exists; --force replaces it.")
