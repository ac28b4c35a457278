"""Take the screenshots of the documentation in a real browser: TensorBoard's page of a run.

    python -m template.site.screenshots

It trains ``experiment=synthetic``, starts TensorBoard, and writes ``harness/docs/tensorboard.png``.
It needs Chromium, and prints one line where none is installed. ``harness/docs/terminal.py`` draws
the terminal, and ``scripts/runs.py report`` writes the report of a sweep.
"""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from template.site.yaml_keys import ROOT

DOCS = ROOT / "harness" / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SIZE = (1280, 780)
RUNS = "outputs"
# Four curves without smoothing; %28 is (, %7C is |, %29 is ), %2F is /.
PAGE = "#scalars&_smoothingWeight=0&tagFilter=%28train%7Cval%29%2F%28loss%7Caccuracy%29"
WAIT_SECONDS = 60


def main() -> int:
    """Take the screenshots, and return the exit status."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("No screenshot was taken: install Chromium, such as Debian's package chromium.")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        output = f"output_dir={folder}/{RUNS}"
        train = [sys.executable, "train.py", "experiment=synthetic", output]
        subprocess.run(train, cwd=ROOT, check=True, capture_output=True)
        with tensorboard(folder) as address:
            picture(browser, f"{address}/{PAGE}", DOCS / "tensorboard.png")
    return 0


@contextlib.contextmanager
def tensorboard(folder: str) -> Iterator[str]:
    """Serve the runs in a folder in the block, and give the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("tensorboard")
    command = [program, "--logdir", RUNS, "--host", "127.0.0.1", "--port", str(port)]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=folder, stdout=nowhere, stderr=nowhere)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_runs(address)
        yield address
    finally:
        process.terminate()
        process.wait()


def wait_for_runs(address: str) -> None:
    """Wait until TensorBoard has read a run."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        page = f"{address}/data/runs"
        with contextlib.suppress(OSError), urllib.request.urlopen(page, timeout=5) as answer:
            if answer.read().strip() != b"[]":
                return
        time.sleep(0.5)
    raise SystemExit(f"TensorBoard has read no run after {WAIT_SECONDS} seconds.")


def picture(browser: str, address: str, path: Path) -> None:
    """Write a picture of a page, once its scripts have drawn it."""
    with tempfile.TemporaryDirectory() as profile:
        options = [*OPTIONS, f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}"]
        options += ["--timeout=15000", "--virtual-time-budget=15000", f"--screenshot={path}"]
        subprocess.run([browser, *options, address], check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
