"""One conversion: read, choose, name, write beside the target, verify, rename."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import UserError

from . import network
from .choose import WHOLE, Chosen, choose, holds_tensors, is_odd_tensor
from .layout import target_dtype
from .names import Names
from .read import Checkpoint
from .report import Entry, Report, printable
from .tensors import CheckpointError, Tensor
from .verify import verify as verify_copy
from .write import write_pt, write_safetensors

_WRITERS = {".pt": write_pt, ".pth": write_pt, ".safetensors": write_safetensors}
SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")  # of checkpoints
DTYPES = ("keep", "float32", "float16", "bfloat16")


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
        source: a file or a torch.distributed.checkpoint folder.
        output: ends in .pt, .pth or .safetensors; by default `<source's stem>.weights.pt`
            beside the source.
        dtype: what floating tensors become: keep, float32, float16 or bfloat16.
        key: the entry of the file to take, dotted where it is nested; by default the usual ones.
        prefix: the submodule that is the network, "" for the whole, "auto" to find it.
        ema: prefer averaged weights where there are some.
        keep_module: do not strip `module`, the wrapper's name, because a real child is called so.
        verify: compare the new file with the source and, where the run's config lies two folders
            above and neither key nor prefix is given, with the network that it describes, before
            the file gets its name.
        force: replace an existing output.
        dry_run: write nothing.

    Raises:
        UserError: the arguments cannot be followed.
        CheckpointError: the source cannot be converted.
        OSError: the system refuses to read or write.
    """
    source = Path(source)
    output = Path(output) if output else default_output(source)
    _check_arguments(source, output, dtype, force or dry_run)
    try:
        with Checkpoint(source) as checkpoint:
            chosen = choose(checkpoint.root, key, ema)
            is_usual = verify and prefix == "auto" and not key
            bare, notes = network.network_of(source) if is_usual else (None, [])
            known = network.names_in_module(bare) if bare else ()
            keep_module = keep_module or chosen.is_exact
            names = Names(chosen.state, prefix, chosen.is_lightning, keep_module, known, ema)
            tensors, dropped = _select(chosen, names)
            sources = {new: old for old, new in names.new.items()}
            entries = {
                n: Entry(sources[n], target_dtype(t, dtype), t.shape) for n, t in tensors.items()
            }
            num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
            about = str(source), str(output), checkpoint.kind, chosen.key
            report = Report(*about, entries, num_bytes, chosen.rest + dropped, notes=notes)
            if bare:
                network.load_strictly(bare, network.meta_state(entries))
            if dry_run:
                return report
            with _new_file(output) as (fd, temporary):
                _WRITERS[output.suffix](fd, tensors, dtype, names.metadata(chosen.metadata))
                if verify:
                    with Checkpoint(temporary) as written:
                        verify_copy(tensors, {name: written.root[name] for name in tensors}, dtype)
                    report.verified.append("every byte")
                if bare:
                    if output.suffix != ".safetensors":
                        network.load_strictly(bare, network.mapped_state(temporary))
                    report.verified.append(f"loads strict into config.yaml's {type(bare).__name__}")
                checkpoint.check_unchanged()
            report.is_written = True
            return report
    except CheckpointError as error:
        raise CheckpointError(printable(f"{source}: {error}")) from error


def stem_of(source: Path) -> str:
    """Return the name without a checkpoint's suffix; the dots in `loss=0.12` are no suffix."""
    path = source if source.name not in ("", "..") else source.resolve()
    return path.stem if path.suffix in SUFFIXES else path.name


def default_output(source: Path) -> Path:
    """Return where the weights go if nobody says."""
    path = source if source.name not in ("", "..") else source.resolve()
    return path.with_name(f"{stem_of(path)}.weights.pt")


def _check_arguments(source: Path, output: Path, dtype: str, force: bool) -> None:
    if not source.exists():
        raise UserError(f"{source} does not exist.")
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not one of {', '.join(DTYPES)}.")
    if output.suffix not in _WRITERS:
        raise UserError(f"{output} must end in one of {', '.join(_WRITERS)}.")
    if not output.parent.is_dir():
        raise UserError(f"{output.parent} is not a folder; create it first.")
    if output.exists() and (output.is_dir() or output.samefile(source)):
        raise UserError(f"{output} is the source or a folder; name another output.")
    if source.is_dir() and output.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{output} is inside the checkpoint {source}; name another output.")
    if output.exists() and not force:
        raise UserError(f"{output} exists; --force replaces it.")


def _select(chosen: Chosen, names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """Return the network's tensors under their new names, and what else there was, in words."""
    tensors: dict[str, Tensor] = {}
    left_out: Counter[str] = Counter()
    seen: set[int] = set()
    for old, value in chosen.state.items():
        new = names.new.get(old)
        if new is None:
            left_out[old.partition(".")[0] + (".*" if "." in old else "")] += 1
        elif isinstance(value, Tensor):
            tensors[new] = value
        elif is_odd_tensor(value):
            raise CheckpointError(f"{old} is not a dense tensor ({value.name}); make it one first")
        elif holds_tensors(value, seen) and not old.endswith("_extra_state"):
            path = old if chosen.key == WHOLE else f"{chosen.key}.{old}"
            raise CheckpointError(
                f"{chosen.key} holds tensors, and {old} in it others; --key {path} takes those"
            )
        else:
            left_out[f"{old} (not a tensor)"] += 1
    if not tensors:
        raise CheckpointError("what would be taken holds no tensor; --prefix and --key choose")
    return tensors, [f"{name} ({num})" if num > 1 else name for name, num in left_out.items()]


@contextmanager
def _new_file(output: Path) -> Iterator[tuple[int, Path]]:
    """Open a file that is called `output` only if all of the block succeeds."""
    temporary = output.with_name(f"{output.name}.{os.urandom(4).hex()}.tmp")
    fd = None
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        yield fd, temporary
        os.fsync(fd)
        os.replace(temporary, output)
    except BaseException:  # also a signal's: nothing half written stays
        temporary.unlink(missing_ok=True)
        raise
    finally:
        if fd is not None:
            os.close(fd)
    folder = os.open(output.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name itself
    finally:
        os.close(folder)
