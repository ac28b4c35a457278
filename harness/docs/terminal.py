"""Draw harness/docs/terminal.svg: two processes train, Ctrl-C ends them, and they resume.

python harness/docs/terminal.py
"""

import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 118
OVERRIDES = ["strategy=ddp", "trainer.devices=2", "trainer.max_epochs=5"]
# The format of rich's own picture, without the fonts that it would fetch from the network.
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""


def record(overrides: list[str], stop_at: bytes | None = None) -> str:
    """Return everything that a training writes to a terminal; after ``stop_at`` press Ctrl-C."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ.update(COLUMNS=str(COLUMNS), TERM="xterm-256color", VIRTUAL_ENV=sys.prefix)
        os.execv(sys.executable, [sys.executable, "train.py", *overrides])
    written = b""
    while True:
        try:
            data = os.read(terminal, 2**16)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        if stop_at and stop_at not in written and stop_at in written + data:
            os.write(terminal, b"\x03")
        written += data
    os.waitpid(pid, 0)
    return written.decode()


def screen(written: str) -> list[str]:
    """Return the lines on the screen at the end, with their colours."""
    lines = [""]
    for piece in re.split(r"(\n|\x1b\[1A|\x1b\[2K|\x1b\[\?25[hl]|\r)", written):
        if piece == "\n":
            lines.append("")
        elif piece == "\x1b[1A":
            lines.pop()
        elif piece == "\x1b[2K":
            lines[-1] = ""
        elif piece and piece != "\r" and not piece.startswith("\x1b[?"):
            lines[-1] += piece
    return lines


def main() -> None:
    """Train, and draw the screen."""
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        output = f"output_dir={folder}"
        commands = {
            " ".join(OVERRIDES): record([*OVERRIDES, output], stop_at=b"epoch 2"),
            "resume=auto": record(["resume=auto", output]),
        }
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    for typed, written in commands.items():
        console.print(f"[bold green]$[/] python train.py {typed}", highlight=False)
        shown = written.replace(f"{Path(folder).name}/", "outputs/").replace(f"{ROOT}/", "")
        for line in screen(shown):
            console.print(Text.from_ansi(line), soft_wrap=True)
    picture = console.export_svg(title="train.py", code_format=FORMAT, unique_id="t")
    (ROOT / "harness" / "docs" / "terminal.svg").write_text(picture)


if __name__ == "__main__":
    main()
