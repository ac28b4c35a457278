"""One conversion: read, choose, name, write beside the target, verify, rename."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from project.errors import UserError

from . import network
from .choose import Chosen, choose, is_odd_tensor
from .layout import target_dtype
from .names import Names
from .read import Checkpoint
from .tensors import CheckpointError, Tensor
from .verify import verify as verify_copy
from .write import write_pt, write_safetensors

if TYPE_CHECKING:
    import torch

_WRITERS = {".pt": write_pt, ".pth": write_pt, ".safetensors": write_safetensors}
DTYPES = ("keep", "float32", "float16", "bfloat16")


@dataclass
class Report:
    """What a conversion did, for people (`str`) and programs (`as_dict`)."""

    source: str
    output: str
    kind: str
    key: str
    prefix: str
    tensors: dict[str, dict[str, Any]]
    num_bytes: int
    dropped: list[str]
    verified: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_written: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain types."""
        return asdict(self)

    def __str__(self) -> str:
        types = Counter(entry["dtype"] for entry in self.tensors.values())
        listed = ", ".join(f"{num} {dtype}" for dtype, num in types.items())
        renamed = [(t["source"], new) for new, t in self.tensors.items() if t["source"] != new]
        lines = [
            self.source,
            f"  took      {listed}; {self.num_bytes / 1e6:,.1f} MB; {self.key} of {self.kind}",
            f"  renamed   {len(renamed)}"
            + (": {} -> {}, ...".format(*renamed[0]) if renamed else ""),
            f"  dropped   {', '.join(self.dropped) or 'nothing'}",
            f"  verified  {'; '.join(self.verified) or 'nothing'}",
            *(f"  note      {note}" for note in self.notes),
            f"  {'wrote    ' if self.is_written else 'would be '} {self.output}",
        ]
        return "\n".join(lines)


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
        output: ends in .pt, .pth or .safetensors; by default `<source's stem>.weights.pt`.
        dtype: what floating tensors become: keep, float32, float16 or bfloat16.
        key: the entry of the file to take, dotted where it is nested; by default the usual ones.
        prefix: the submodule that is the network, "" for the whole, "auto" to find it.
        ema: prefer averaged weights where there are some.
        keep_module: do not strip `module`, the wrapper's name, because a real child is called so.
        verify: compare the new file with the source, and with the network that the run's config
            two folders above describes, before it gets its name.
        force: replace an existing output.
        dry_run: write nothing.

    Raises:
        UserError: the arguments cannot be followed.
        CheckpointError: the source cannot be converted.
        OSError: the system refuses to read or write.
    """
    source = Path(source)
    output = Path(output) if output else source.with_name(f"{source.stem}.weights.pt")
    _check_arguments(source, output, dtype, force)
    try:
        with Checkpoint(source) as checkpoint:
            chosen = choose(checkpoint.root, key, ema)
            bare, note = _network(source) if verify else (None, "")
            known = [f"{network.PREFIX}.{name}" for name in bare.state_dict()] if bare else []
            names = Names(
                chosen.state,
                prefix=prefix,
                is_lightning=chosen.is_lightning or bool(known),
                keep_module=keep_module or chosen.is_exact,
                known=known,
                ema=ema,
            )
            tensors, dropped = _select(chosen, names)
            report = _report(checkpoint, output, chosen, names, tensors, dtype)
            report.dropped += dropped
            report.notes += [note] if note else []
            if not dry_run:
                metadata = names.metadata(chosen.metadata)
                with _new_file(output) as (fd, temporary):
                    _WRITERS[output.suffix](fd, tensors, dtype, metadata)
                    if verify:
                        _verify(tensors, temporary, dtype, bare, report)
                    checkpoint.check_unchanged()
                report.is_written = True
            return report
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


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
    if output.exists() and not force:
        raise UserError(f"{output} exists; --force replaces it.")


def _network(source: Path) -> "tuple[torch.nn.Module | None, str]":
    config = network.find_config(source)
    if config is None:
        return None, ""
    try:
        return network.build_network(config), ""
    except network.UnbuildableError as error:
        return None, f"not held against the network of {config}: {error}"


def _select(chosen: Chosen, names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """Return the network's tensors under their new names, and what else there was, in words."""
    tensors: dict[str, Tensor] = {}
    left_out: Counter[str] = Counter()
    for old, value in chosen.state.items():
        new = names.new.get(old)
        if new is None:
            left_out[old.partition(".")[0] + (".*" if "." in old else "")] += 1
        elif isinstance(value, Tensor):
            tensors[new] = value
        elif is_odd_tensor(value):
            raise CheckpointError(f"{old} is not a dense tensor ({value.name}); make it one first")
        else:
            left_out[f"{old} (not a tensor)"] += 1
    return tensors, [f"{name} ({num})" if num > 1 else name for name, num in left_out.items()]


def _report(
    checkpoint: Checkpoint,
    output: Path,
    chosen: Chosen,
    names: Names,
    tensors: Mapping[str, Tensor],
    dtype: str,
) -> Report:
    sources = {new: old for old, new in names.new.items()}
    entries = {
        name: {"source": sources[name], "dtype": target_dtype(t, dtype), "shape": list(t.shape)}
        for name, t in tensors.items()
    }
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    prefix = ".".join(names.prefix)
    place = str(checkpoint.path), str(output), checkpoint.kind
    return Report(*place, chosen.key, prefix, entries, num_bytes, dropped=chosen.rest)


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
    except BaseException:
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


def _verify(
    tensors: Mapping[str, Tensor],
    temporary: Path,
    dtype: str,
    bare: "torch.nn.Module | None",
    report: Report,
) -> None:
    with Checkpoint(temporary) as written:
        copies = {name: written.root[name] for name in tensors}
        verify_copy(tensors, copies, dtype)
        report.verified.append("every byte")
    if bare is not None:
        network.load_strictly(bare, _torch_state(temporary, copies))
        report.verified.append(f"loads strict into {type(bare).__name__} of config.yaml")


def _torch_state(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Load a .pt with torch itself; of a .safetensors take the shapes, which need no package."""
    import torch

    if path.name.endswith(".tmp") and ".safetensors." not in path.name:
        return dict(torch.load(path, mmap=True, weights_only=True))
    return {
        name: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta")
        for name, t in tensors.items()
    }
