"""One conversion: read, choose, name, write beside the target, verify, rename."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UserError
from harness.files import replacing

from .loading import opened
from .read import Checkpoint
from .sources import checked, default_output, printable, quoted, stem_of
from .stream import verify as verify_copy
from .tensors import target_dtype
from .write import write_pt, write_safetensors

_WRITERS = {".pt": write_pt, ".pth": write_pt, ".safetensors": write_safetensors}
OUTPUTS = tuple(_WRITERS)  # the suffixes
DTYPES = ("keep", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Entry:
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
    notes: list[str]  # what a user should know besides
    verified: list[str] = field(default_factory=list)  # what the result was compared with
    is_written: bool = False  # not after a dry run

    def __str__(self) -> str:
        types = Counter(entry.dtype for entry in self.tensors.values())
        counts = ", ".join(f"{num} {dtype}" for dtype, num in types.items())
        renamed = [f"{e.source} -> {new}" for new, e in self.tensors.items() if e.source != new]
        around = ", ".join(self.left_out)
        lines = {
            "took": f"{counts}, {self.num_bytes / 1e6:,.1f} MB, from {self.key} ({self.kind})",
            "renamed": f"{len(renamed)}, such as {renamed[0]}" if renamed else "nothing",
            "left out": around
            and f"{around}: of the module around the network; the file alone lacks them",
            "dropped": ", ".join(self.dropped) or "nothing",
            "verified": ", ".join(self.verified) or "nothing",
            "note": "; ".join(self.notes),
            "wrote" if self.is_written else "would be": self.output,
        }
        width = max(map(len, lines))
        texts = (f"  {name:{width}}  {text}" for name, text in lines.items() if text)
        return "\n".join(map(printable, [self.source, *texts]))

    def listing(self) -> str:
        """Return a line for each tensor."""
        width = max(len(printable(name)) for name in self.tensors)
        return "\n".join(
            f"  {printable(name):{width}}  {e.dtype} {e.shape}  <- {printable(e.source)}"
            for name, e in self.tensors.items()
        )


def convert(
    source: str | Path,
    output: str | Path | None = None,
    *,
    dtype: str = "keep",
    key: str | None = None,
    prefix: str = "auto",
    ema: bool = True,
    keep_module: bool = False,
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
        keep_module: do not strip `module`, the wrapper's name, because a real child is called so.
        verify: compare the new file with the source before it gets its name.
        force: replace an existing output.
        dry_run: write nothing.

    Raises:
        UserError: the arguments cannot be followed.
        CheckpointError: the source cannot be converted.
        OSError: the system refuses to read or write.
    """
    source = checked(source)
    output = Path(output) if output else default_output(source)
    _check_arguments(source, output, dtype, force or dry_run)
    try:
        with opened(source, key=key, prefix=prefix, ema=ema, keep_module=keep_module) as weights:
            if output.exists() and weights.checkpoint.is_read_from(output):
                raise UserError(f"{output} is the source or a part of it; name another output.")
            tensors = weights.tensors
            report = Report(
                str(source),
                str(output),
                weights.checkpoint.kind,
                weights.key,
                {
                    new: Entry(weights.sources[new], target_dtype(tensor, dtype), tensor.shape)
                    for new, tensor in tensors.items()
                },
                sum(tensor.num_bytes for tensor in tensors.values()),
                weights.left_out,
                weights.dropped,
                weights.notes,
            )
            if dry_run:
                return report
            with replacing(output, is_forced=force) as file:
                _WRITERS[output.suffix](file, tensors, dtype, weights.checkpoint.max_result)
                file.flush()
                if verify:
                    with Checkpoint(Path(file.name)) as written:
                        verify_copy(tensors, written.root, dtype)
                    records = (record for tensor in tensors.values() for record in tensor.records)
                    has_checksums = all(record.crc is not None for record in records)
                    no_checksums = "the copy, byte for byte; the source states no checksums"
                    report.verified.append("every byte" if has_checksums else no_checksums)
                weights.checkpoint.check_unchanged()
            report.is_written = True
            return report
    except FileExistsError as error:
        raise UserError(f"{output} exists, since a moment ago; --force replaces it.") from error


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
