"""Convert a checkpoint: open it, select the weights, write a temporary file, verify, rename it.

In: a path, and options that choose the weights. Out: ``Weights`` with a file (``convert``) or
without (``opened``), or torch's tensors (``load``).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, printable
from harness.files import atomic_write

from .checkpoint import Checkpoint, resolve_source
from .choose import Selection, select
from .tensors import CheckpointError, StoredTensor, check, stream
from .write import verify, write_pt, write_safetensors

if TYPE_CHECKING:
    import torch

_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")  # of checkpoints
_WRITERS = {".pt": write_pt, ".pth": write_pt, ".safetensors": write_safetensors}
_MIN_RESULT = 100_000_000  # bytes of weights that every file may have
_MAX_EXPANSION = 16  # further bytes of weights per byte of the file


@dataclass(kw_only=True)
class Weights(Selection):
    """The weights in an open checkpoint. Their bytes stay in the file until ``read``.

    ``str(weights)`` reports in a few lines what was chosen, renamed, left out and verified.
    """

    checkpoint: Checkpoint
    output: Path | None = None  # the file that `convert` writes
    verified: str = ""  # which comparisons succeeded; "" in a dry run

    def __str__(self) -> str:
        types = Counter(tensor.dtype for tensor in self.tensors.values())
        counts = ", ".join(f"{num} {dtype}" for dtype, num in types.items())
        megabytes = sum(tensor.num_bytes for tensor in self.tensors.values()) / 1e6
        renamed = [f"{old} -> {new}" for new, old in self.sources.items() if old != new]
        rows = {
            "tensors": f"{counts}, {megabytes:,.1f} MB, from {self.key} ({self.checkpoint.kind})",
            "renamed": f"{len(renamed)}, such as {renamed[0]}" if renamed else "nothing",
            "left out": ", ".join(self.left_out) or "nothing",
            "verified": self.verified,
            "note": "; ".join(self.notes),
            "wrote" if self.verified else "would write": str(self.output),
        }
        texts = (f"  {name:11}  {text}" for name, text in rows.items() if text)
        return "\n".join(map(printable, [str(self.checkpoint.path), *texts]))

    def listing(self) -> str:
        """Return one line per tensor: its name, type and shape, and its name in the file."""
        return "\n".join(
            printable(f"  {name}  {tensor.dtype} {tensor.shape}  <- {self.sources[name]}")
            for name, tensor in self.tensors.items()
        )

    def read(self, names: Iterable[str]) -> dict[str, "torch.Tensor"]:
        """Return the named tensors with their values. Names of the same tensor share its memory.

        Raises:
            CheckpointError: the file is damaged.
        """
        names = [*names]
        name_of = {self.tensors[name]: name for name in names}
        values = dict(zip(name_of, self.each(name_of.values()), strict=True))
        return {name: values[self.tensors[name]] for name in names}

    def each(self, names: Iterable[str]) -> Iterator["torch.Tensor"]:
        """Yield the named tensors one by one, after the checksums of all have been verified.

        Raises:
            CheckpointError: the file is damaged.
        """
        names = [*names]
        self.check_size({self.tensors[name] for name in names})
        for name in names:
            check(self.tensors[name].record, name)
        yield from (_read_tensor(self.tensors[name]) for name in names)

    def check_size(self, tensors: Iterable[StoredTensor]) -> None:
        """Raise if the weights need far more bytes than the file has, as expanded views do."""
        # Elements that a view skips cost a sixteenth: they are read, which is fast, but not kept.
        cost = sum(max(t.num_bytes, t.span * t.itemsize // 16) for t in tensors)
        if cost > _MIN_RESULT + _MAX_EXPANSION * self.checkpoint.num_bytes:
            raise CheckpointError(
                f"damaged: its weights would take {cost / 1e9:,.1f} GB, far more than the file"
            )


def _read_tensor(tensor: StoredTensor) -> "torch.Tensor":
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
    """Open a checkpoint and find its weights. The arguments are the command's options.

    Args:
        source: a file, a folder of shards, or a run's folder.
        key: the entry that holds the weights; "" is the whole file, ``None`` the usual entry.
        prefix: the submodule that is the network; "" is the whole module, "auto" finds the network.
        ema: whether to prefer averaged weights.

    Raises:
        UserError: the source does not exist.
        CheckpointError: the source cannot be read, has changed, or no entry clearly holds weights.
    """
    source = resolve_source(source)
    try:
        with Checkpoint(source) as checkpoint:
            chosen = select(checkpoint.root, key, prefix, ema, checkpoint.budget)
            yield Weights(**vars(chosen), checkpoint=checkpoint)
            checkpoint.check_unchanged()
    except CheckpointError as error:
        raise CheckpointError(printable(f"{source}: {error}")) from error


def load(source: str | Path, **options: Any) -> dict[str, "torch.Tensor"]:
    """Return the weights of a checkpoint as a plain state_dict of CPU tensors.

    It writes no file. Options and errors are those of ``opened``.
    """
    with opened(source, **options) as weights:
        return weights.read(weights.tensors)


def default_output(source: Path) -> Path:
    """Return the default output path. Only a checkpoint's suffix is cut: not ".12" of loss=0.12."""
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

    Args:
        source: a file, a folder of shards, or a run's folder.
        output: the new file; ``None`` puts it beside the source.
        force: whether to replace an existing output.
        dry_run: whether to write nothing.
        **options: those of ``opened``.

    Raises:
        UserError: the source does not exist, or the output cannot be used.
        CheckpointError: the source cannot be converted.
        OSError: the system cannot read or write a file.
    """
    source = resolve_source(source)
    output = Path(output) if output else default_output(source)
    if output.suffix not in _WRITERS:
        if output.is_dir():
            raise UserError(f"{output} is a folder. Name a file in it: -o {output / 'weights.pt'}")
        raise UserError(f"{output} must end in one of {', '.join(_WRITERS)}.")
    if output.resolve() == source.resolve():
        raise UserError(f"{output} is also the source. Name another output: -o OUT.")
    if output.exists() and not (force or dry_run):
        raise UserError(f"{output} exists already. --force replaces it.")
    with opened(source, **options) as weights:
        weights.output = output
        if not dry_run:
            _write(weights, output, force)
        return weights


def _write(weights: Weights, output: Path, force: bool) -> None:
    tensors, is_shared = weights.tensors, output.suffix != ".safetensors"
    weights.check_size({*tensors.values()} if is_shared else tensors.values())
    with atomic_write(output, is_forced=force) as file:
        checksums = _WRITERS[output.suffix](file, tensors)
        file.flush()
        with Checkpoint(Path(file.name)) as copy:
            verify(tensors, checksums, copy.root)
        weights.checkpoint.check_unchanged()
    weights.verified = "the output equals the source, and the source matches its own checksums"
