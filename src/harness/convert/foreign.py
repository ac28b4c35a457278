"""What is foreign: files that torch did not write get a name, names in a file are safe to print."""

import re
import shlex
from pathlib import Path

_UNPACK = "packed with {}; unpack it first"
_OTHER = "written by {}, not by torch"
_STARTS = {
    b"version https://git-lfs": "a Git LFS pointer to the file; git lfs pull downloads it",
    b"\x1f\x8b": _UNPACK.format("gzip"),
    b"BZh": _UNPACK.format("bzip2"),
    b"\xfd7zXZ": _UNPACK.format("xz"),
    b"\x28\xb5\x2f\xfd": _UNPACK.format("zstd"),
    b"7z\xbc\xaf": _UNPACK.format("7-Zip"),
    b"Rar!": _UNPACK.format("rar"),
    b"PK\x05\x06": "an empty zip",
    b"\x89HDF": "HDF5, " + _OTHER.format("Keras or h5py"),
    b"GGUF": "GGUF, " + _OTHER.format("llama.cpp"),
    b"\x93NUMPY": "an array, " + _OTHER.format("numpy.save"),
}
_HTML = re.compile(rb"\s*<(!doctype|html|head|\?xml)", re.IGNORECASE)
_ONNX = re.compile(rb"\x08[\x01-\x14]([\x12\x3a\x42]|\x10)")  # ir_version, then the next field
_TEXT = bytes({*range(32, 256), *b"\t\n\r"})


def foreign(head: bytes, path: Path) -> str | None:
    """Return what a file is that torch did not write, as far as its first 512 bytes tell."""
    for start, what in _STARTS.items():
        if head.startswith(start):
            return what
    if head.startswith(b"PK\x03\x04"):
        first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        is_keras = path.suffix == ".keras"
        is_array = first.endswith(b".npy")
        other = "numpy.savez" if is_array else "Keras" if is_keras else None
        return f"a zip, {_OTHER.format(other)}" if other else None
    if head[8:10] == b'{"':
        return "a safetensors file that ends inside its header; copy it again"
    if head[257:262] == b"ustar":
        return _UNPACK.format("tar")
    if _HTML.match(head):
        return "a web page: its download failed or asks for a login"
    if path.suffix == ".onnx" or _ONNX.match(head):
        return "an ONNX model, " + _OTHER.format("an exporter")
    if head[4:8] == b"TFL3" or path.suffix in (".pb", ".tflite"):
        return "a model " + _OTHER.format("TensorFlow")
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
