"""What a path stands for: a file, a folder that is one checkpoint, the shards of an index.

Hugging Face's sharded files have an index beside them, `*.safetensors.index.json` or
`*.bin.index.json`, whose `weight_map` says in which of the files each tensor is. Files that torch
did not write get a name, and names in a file are made safe to print.
"""

import json
import os
import re
import shlex
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.errors import UserError

from .tensors import CheckpointError, parsing

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")  # of checkpoints
_INDEX = re.compile(r"\.(safetensors|bin|pt|pth|ckpt)\.index(\.\w+)?\.json$")
_SHARD = re.compile(r"-\d+-of-(?!0*1\b)\d+")  # one of one is the whole
_RANK = re.compile(r"^(consolidated\.|mp_rank_)\d+")  # of Llama, of Megatron
MAX_INDEX = 100_000_000  # bytes
_STARTS = {
    b"version https://git-lfs": "a Git LFS pointer to the file; git lfs pull downloads it",
    b"\x1f\x8b": "packed with gzip; unpack it first",
    b"\x89HDF": "HDF5, written by Keras or h5py, not by torch",
    b"GGUF": "GGUF, written by llama.cpp, not by torch",
}
_HTML = re.compile(rb"\s*<(!doctype|html|head|\?xml)", re.IGNORECASE)
_TEXT = bytes({*range(32, 256), *b"\t\n\r"})


def is_checkpoint_folder(path: Path) -> bool:
    """Whether a folder as a whole is one checkpoint, be it of a kind that is refused."""
    has_index = os.path.isfile(path / ".metadata") or os.path.isfile(path / "latest")
    return has_index or any(path.glob("*zero_pp_rank*")) or bool(indexes(path))


def is_index(path: Path) -> bool:
    """Whether a file is the index of shards beside it."""
    return bool(_INDEX.search(path.name))


def indexes(folder: Path) -> list[Path]:
    """Return the indexes of shards in a folder, those of safetensors before others."""
    paths = (path for path in folder.glob("*.json") if is_index(path) and os.path.isfile(path))
    return sorted(paths, key=lambda path: path.name.partition(".")[2], reverse=True)


def whole(source: str | Path) -> Path:
    """Return the path of the whole checkpoint: for a shard its index, where that lies beside it.

    A path such as `.` or `..` becomes another that ends in a name.
    """
    path = Path(source)
    path = path if path.name not in ("", "..") else path.resolve()
    if os.path.isfile(path) and not is_index(path):
        for index in indexes(path.parent):
            with suppress(OSError), index.open("rb") as file:
                if json.dumps(path.name).encode() in file.read(MAX_INDEX):
                    return index
    return path


def checked(source: str | Path) -> Path:
    """Return the path of a whole checkpoint that exists.

    Raises:
        UserError: there is no such file, or it is a part of what cannot be joined.
    """
    path = whole(source)
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    refuse_part(path)
    return path


def refuse_part(path: Path) -> None:
    """Raise a CheckpointError for a file that is one of several, and cannot be joined from here."""
    what = ""
    if path.suffix == ".distcp":
        folder = quoted(path.parent)
        what = f"a part of a distributed checkpoint; convert its folder, {folder}"
    elif os.path.isfile(path) and not is_index(path) and _SHARD.search(path.name):
        what = (
            "one of the shards of a network, whose index (*.index.json) is not beside it; "
            "copy that and all shards into one folder, and convert the folder"
        )
    for part in (path, path.parent):
        others = _RANK.sub(r"\1*", part.name)
        if others != part.name and len(list(part.resolve().parent.glob(others))) > 1:
            what = (
                f"one of the parts {others} into which a network was split; "
                "join them with a script of the project that wrote them"
            )
    if what:
        raise CheckpointError(f"{path}: {what}")


def read_index(index: Path, text: bytes, read: Callable[[Path], Any]) -> dict[str, Any]:
    """Return the tensors of all shards, which `read` opens, held against the text of the index.

    Raises:
        CheckpointError: a shard is missing, or does not hold the names that the index says.
    """
    with parsing(index.name):
        places: dict[str, str] = json.loads(text)["weight_map"]
        files = sorted(set(places.values()))
    if not files or any(Path(file).name != file or is_index(Path(file)) for file in files):
        raise CheckpointError(f"damaged: {index.name} names no shards beside it")
    if missing := [file for file in files if not (index.parent / file).is_file()]:
        raise CheckpointError(
            f"of the {len(files)} shards that {index.name} names {len(missing)} are missing, the "
            f"first is {missing[0]}; copy or download them again"
        )
    root: OrderedDict[str, Any] = OrderedDict()
    for file in files:
        try:
            shard = read(index.parent / file)
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from error
        if not isinstance(shard, dict):
            raise CheckpointError(f"damaged: {file} is not a shard")
        for name in shard:
            if places.get(name) != file:
                said = f"is in {places[name]}" if name in places else "is nowhere"
                by = f"by {index.name} it {said}"
                raise CheckpointError(f"damaged: {name} is in {file}, and {by}")
        root.update(shard)
    if lost := next((name for name in places if name not in root), None):
        raise CheckpointError(f"damaged: {lost} is not in {places[lost]}, as {index.name} says")
    return root


def stem_of(source: Path) -> str:
    """Return the name without a checkpoint's suffix; the dots in `loss=0.12` are no suffix."""
    name = _INDEX.sub("", source.name)
    return source.stem if name == source.name and source.suffix in SUFFIXES else name


def default_output(source: Path) -> Path:
    """Return where the weights go if nobody says."""
    return source.with_name(f"{stem_of(source)}.weights.pt")


def jobs(sources: Sequence[str], output: str | None) -> list[tuple[Path, Path]]:
    """Pair each checkpoint with its output.

    Raises:
        UserError: an input does not exist, or an output is also an input, or that of two.
    """
    if missing := next((source for source in sources if not os.path.exists(source)), None):
        hint = "; an output has -o before it" if len(sources) > 1 else ""
        raise UserError(f"{missing} does not exist{hint}.")
    found = list({path.resolve(): path for path in map(whole, sources)}.values())
    inputs = {path.resolve(): path for path in found}
    pairs: list[tuple[Path, Path]] = []
    owners: dict[Path, Path] = {}
    for source in found:
        target = default_output(source)
        if output:
            target = Path(output.replace("{stem}", stem_of(source)))
        if (owner := owners.setdefault(target.resolve(), source)) is not source:
            refuse_part(source)
            is_named = output and "{stem}" not in output
            hint = f"-o '{{stem}}{target.suffix}' gives each its own"
            raise UserError(
                f"{target} would be written more than once, for {owner} and for {source}; "
                + (hint if is_named else "convert one at a time")
            )
        if inputs.get(target.resolve(), source) is not source:
            raise UserError(f"{target}, for {source}, is also an input; name another output")
        pairs.append((source, target))
    return pairs


def foreign(head: bytes) -> str | None:
    """Return what a file is that torch did not write, as far as its first 512 bytes tell."""
    for start, what in _STARTS.items():
        if head.startswith(start):
            return what
    if head[8:10] == b'{"':
        return "a safetensors file that ends inside its header; copy it again"
    if _HTML.match(head):
        return "a web page: its download failed or asks for a login"
    if head[:1] != b"\x80" and not head.translate(None, _TEXT):
        return "a JSON file" if head.lstrip()[:1] in (b"{", b"[") else "a text file"
    return None


def printable(text: str) -> str:
    """Return the text in one line, with what a terminal would obey escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def quoted(text: object) -> str:
    """Return the text as one word of a command, to be typed or pasted into a shell."""
    word = str(text)
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + printable(word.replace("\\", "\\\\").replace("'", "\\'")) + "'"
