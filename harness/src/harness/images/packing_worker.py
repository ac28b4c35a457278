"""A process that decodes images for ``packing``: ``python -m harness.images.packing_worker``.

It reads one JSON line after another: the settings, then groups of files with the row of the first.
It writes each image's pixels to its row of the file, and answers a line for each group, with the
pixels' checksums. It ends with its input, and so with the process that has started it.
"""

import json
import os
import signal
import sys
import zlib

from harness.images.decoding import decode, reason


def main() -> None:
    """Decode until no more is asked for."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a run: its own ends
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    root, side, channels = (settings[name] for name in ("root", "side", "channels"))
    # Written by calls, not through a memory map: a full disk is an error here, not a signal.
    pixels = os.open(settings["pixels"], os.O_WRONLY) if settings["pixels"] else None
    for line in sys.stdin:
        first, names = json.loads(line)
        unreadable: dict[int, str] = {}
        checksums = [0] * len(names)
        errno = 0
        for row, name in enumerate(names, first):
            try:
                data = decode(os.path.join(root, name), side, channels).tobytes()
            except Exception as error:  # Pillow raises many kinds for damaged files
                unreadable[row] = reason(error)
                continue
            checksums[row - first] = zlib.crc32(data)
            try:
                if pixels is not None:
                    _write(pixels, data, row * len(data))
            except OSError as error:
                errno = error.errno or 0
                break
        answer = {"unreadable": unreadable, "checksums": checksums, "errno": errno}
        print(json.dumps(answer), flush=True)


def _write(file: int, data: bytes, offset: int) -> None:
    while data:  # a nearly full disk takes a part, and refuses the rest
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # who has asked is gone
        os._exit(1)
