"""Turn training checkpoints into plain weights for the CPU.

    python -m harness.convert last.ckpt -o weights.pt
    python -m harness.convert a.ckpt b.ckpt                  several in one call
    python -m harness.convert outputs/default/<run>          a run's best checkpoint
    python -m harness.convert last.ckpt --list               list tensors, write nothing

Then load the file anywhere: net.load_state_dict(torch.load("weights.pt")). The command executes
nothing that a checkpoint contains. harness/docs/checkpoints.md lists the formats, what the command
verifies, and the exit statuses.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError, printable

from .checkpoint import resolve_source
from .conversion import convert, default_output
from .tensors import CheckpointError


def run() -> None:
    """Run the command. A signal raises an exception, so that temporary files are removed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--list | head` closes the pipe early
    for stream in (sys.stdout, sys.stderr):  # the terminal may lack letters of a tensor's name
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a TextIO
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert each source, and return the highest of their exit statuses."""
    options = vars(_parser().parse_args(arguments))
    sources, output, as_list = (options.pop(name) for name in ("sources", "output", "list"))
    statuses = [0]
    try:
        jobs = _jobs(sources, output)
    except (UserError, OSError) as error:
        return _failure(error)
    for source, target in jobs.items():
        try:
            report = convert(source, target, dry_run=as_list, **options)
        except (UserError, OSError) as error:
            statuses.append(_failure(error))
            continue
        print(report, *[report.listing()] * as_list, sep="\n", flush=True)
    return max(statuses)


def _jobs(sources: Sequence[str], output: str | None) -> dict[Path, Path]:
    """Return the output path of each input path.

    Raises:
        UserError: two inputs have the same output, or an output is also an input.
    """
    inputs = [*map(resolve_source, sources)]
    jobs = {source: Path(output) if output else default_output(source) for source in inputs}
    if len({path.resolve() for path in (*inputs, *jobs.values())}) < 2 * len(inputs):
        raise UserError(
            "Two inputs would write the same output, or an output is also an input. "
            "Convert one checkpoint per command, with -o OUT."
        )
    return jobs


def _failure(error: Exception) -> int:
    """Print an error, and return its exit status."""
    print(f"error: {printable(str(error))}", file=sys.stderr)
    return 3 if isinstance(error, CheckpointError) else 4 if isinstance(error, OSError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m harness.convert" if sys.argv[0].endswith("__main__.py") else None,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="SRC", help="checkpoints, run folders, folders of shards")
    add("-o", "--output", metavar="OUT", help="*.pt, *.pth, *.safetensors")
    add("--prefix", default="auto", metavar="NAME", help='submodule to convert, "" for all')
    add("--key", metavar="NAME", help="entry with the weights, a.b if nested, '' for all")
    ema = argparse.BooleanOptionalAction
    add("--ema", action=ema, default=True, help="prefer averaged weights if the file has some")
    add("--list", action="store_true", help="list the tensors and write nothing")
    add("--force", action="store_true", help="replace existing outputs")
    return parser


if __name__ == "__main__":
    run()
