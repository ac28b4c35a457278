"""One conversion: read, choose, name, write beside the target, verify, rename."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UserError
from harness.files import replacing

from .choose import Chosen, choose
from .names import Names
from .network import network_of
from .places import holds_tensors, is_odd_tensor, key_for, places_of
from .read import Checkpoint
from .sources import default_output, printable, quoted, refuse_part, stem_of, whole
from .stream import verify as verify_copy
from .tensors import CheckpointError, Tensor, target_dtype
from .write import write_pt, write_safetensors

_WRITERS = {".pt": write_pt, ".pth": write_pt, ".safetensors": write_safetensors}
OUTPUTS = tuple(_WRITERS)  # the suffixes
LEAST_LIMIT = 100_000_000  # bytes that any file may lead to
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
    dropped: list[str]  # what else the source held
    notes: list[str]  # what a user should know besides
    verified: list[str] = field(default_factory=list)  # what the result was compared with
    is_written: bool = False  # not after a dry run

    def __str__(self) -> str:
        types = Counter(entry.dtype for entry in self.tensors.values())
        counts = ", ".join(f"{num} {dtype}" for dtype, num in types.items())
        renamed = [f"{e.source} -> {new}" for new, e in self.tensors.items() if e.source != new]
        lines = {
            "took": f"{counts}, {self.num_bytes / 1e6:,.1f} MB, from {self.key} ({self.kind})",
            "renamed": f"{len(renamed)}, such as {renamed[0]}" if renamed else "nothing",
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
    packages: Collection[str] = (),
    verify: bool = True,
    force: bool = False,
    dry_run: bool = False,
    max_expansion: float = 16,
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
        packages: your own, whose networks may be built: their code is imported and run.
        verify: compare the new file with the source before it gets its name. Where config.yaml
            lies two folders above, and without key and prefix, its network must fit too.
        force: replace an existing output.
        dry_run: write nothing.
        max_expansion: how many times larger than the source the result may be, besides 100 MB.

    Raises:
        UserError: the arguments cannot be followed.
        CheckpointError: the source cannot be converted.
        OSError: the system refuses to read or write.
    """
    source = whole(source)
    output = Path(output) if output else default_output(source)
    _check_arguments(source, output, dtype, force or dry_run)
    try:
        with Checkpoint(source) as checkpoint:
            if output.exists() and checkpoint.is_read_from(output):
                raise UserError(f"{output} is the source or a part of it; name another output.")
            chosen = choose(checkpoint.root, key, ema, checkpoint.budget)
            is_usual = verify and prefix == "auto" and key is None
            network, notes = network_of(source, packages) if is_usual else (None, [])
            known, keeps = network.names if network else (), keep_module or chosen.is_exact
            names = Names(
                chosen.state, prefix, chosen.is_lightning, keeps, known, ema, chosen.metadata
            )
            tensors, entries, dropped = select(chosen, names.new, dtype)
            report = Report(
                str(source),
                str(output),
                checkpoint.kind,
                chosen.key,
                entries,
                sum(tensor.num_bytes for tensor in tensors.values()),
                chosen.rest + dropped,
                chosen.notes + names.notes + notes,
            )
            if network:
                network.check({name: entry.shape for name, entry in entries.items()})
            if dry_run:
                return report
            with replacing(output, is_forced=force) as file:
                most = LEAST_LIMIT + max_expansion * checkpoint.num_bytes
                _WRITERS[output.suffix](file, tensors, dtype, names.metadata, most)
                file.flush()
                if verify:
                    with Checkpoint(Path(file.name)) as written:
                        verify_copy(tensors, written.root, dtype)
                    records = (record for tensor in tensors.values() for record in tensor.records)
                    has_checksums = all(record.crc is not None for record in records)
                    no_checksums = "the copy, byte for byte; the source states no checksums"
                    report.verified.append("every byte" if has_checksums else no_checksums)
                if network:
                    name = type(network.module).__name__
                    report.verified.append(f"loads strict into config.yaml's {name}")
                checkpoint.check_unchanged()
            report.is_written = True
            return report
    except CheckpointError as error:
        raise CheckpointError(printable(f"{source}: {error}")) from error
    except FileExistsError as error:
        raise UserError(f"{output} exists, since a moment ago; --force replaces it.") from error


def _check_arguments(source: Path, output: Path, dtype: str, force: bool) -> None:
    if not source.exists():
        raise UserError(f"{source} does not exist.")
    refuse_part(source)
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


def select(
    chosen: Chosen, new_names: Mapping[str, str], dtype: str
) -> tuple[dict[str, Tensor], dict[str, Entry], list[str]]:
    """Return the network's tensors, what is known of each, and what else there was, in words."""
    tensors: dict[str, Tensor] = {}
    entries: dict[str, Entry] = {}
    dropped: list[str] = []
    seen: set[int] = set()
    for old, value in chosen.state.items():
        new = new_names.get(old)
        if new is None:
            dropped.append(old.partition(".")[0] + (".*" if "." in old else ""))
        elif isinstance(value, Tensor):
            tensors[new] = value
            entries[new] = Entry(old, target_dtype(value, dtype), value.shape)
        elif is_odd_tensor(value):
            raise CheckpointError(f"{old} is not a dense tensor ({value.name}); make it one first")
        elif holds_tensors(value, seen) and not old.endswith("_extra_state"):
            others = places_of(value, (*chosen.place, old)).items()
            option = next(filter(None, (key_for(*other) for other in others)), "")
            hint = f"; {option} takes those" if option else ""
            raise CheckpointError(f"{chosen.key} holds tensors, and {old} in it others{hint}")
        else:
            dropped.append(f"{old} (not a tensor)")
    if not tensors:
        raise CheckpointError("what would be taken holds no tensor; --prefix and --key choose")
    return tensors, entries, list(dict.fromkeys(dropped))
