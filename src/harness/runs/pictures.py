"""The pictures that a run has sent to TensorBoard, taken out of its files. No torch."""

from contextlib import suppress
from pathlib import Path

from harness.loggers.event_files import PREFIX, pictures_in


def pictures(run_dir: Path) -> dict[str, bytes]:
    """The newest picture of each name, such as ``test/confusion_matrix``, as a PNG.

    What is damaged, or is still being written, is left out.
    """
    found: dict[str, tuple[int, bytes]] = {}
    paths = run_dir.glob(f"tensorboard/**/{PREFIX}*")
    for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path.name)):
        with suppress(OSError):
            for name, step, data in pictures_in(path):
                if name not in found or step >= found[name][0]:
                    found[name] = (step, data)
    return {name: data for name, (_, data) in found.items()}
