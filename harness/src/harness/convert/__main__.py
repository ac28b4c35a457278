"""Turn training checkpoints into plain weights for the CPU.

    python -m harness.convert last.ckpt -o weights.pt
    python -m harness.convert last.ckpt -o weights.safetensors --dtype bfloat16
    python -m harness.convert a.ckpt b.ckpt                  several in one call
    python -m harness.convert outputs/default/<run>          a run's best checkpoint
    python -m harness.convert last.ckpt --list               what would be taken

and then, anywhere: net.load_state_dict(torch.load("weights.pt")). Nothing in a checkpoint is
executed. harness/docs/checkpoints.md says which formats are read and what is verified.

Exit status: 0 all converted; 1 a mistake in the command; 2 unknown options; 3 an input is not a
checkpoint, is damaged, or cannot be converted; 4 the system refused to read or write (disk full,
permissions); 129, 130, 143 stopped by a signal. Of several inputs all are tried, and the highest
status is returned.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError

from .checkpoint import whole
from .conversion import DTYPES, convert, default_output
from .names import printable
from .tensors import CheckpointError


def run() -> None:
    """Be the command, with an orderly end whatever comes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _stop)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as of `--list | head`
    for stream in (sys.stdout, sys.stderr):  # names may hold what the terminal has no letters for
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a TextIO
    sys.exit(main())


def _stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)  # an exception, so that temporaries are removed


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert what the arguments name and return the exit status."""
    options = vars(_parser().parse_args(arguments))
    sources, output, as_list = (options.pop(name) for name in ("sources", "output", "list"))
    try:
        jobs = _jobs(sources, output)
    except (UserError, OSError) as error:
        return _failure(error)
    status = 0
    for source, target in jobs.items():
        try:
            report = convert(source, target, dry_run=as_list, **options)
        except (UserError, OSError) as error:
            status = max(status, _failure(error, f"{source} -> {target}: "))
            continue
        print(report, *[report.listing()] * as_list, sep="\n", flush=True)
    return status


def _jobs(sources: Sequence[str], output: str | None) -> dict[Path, Path]:
    """Return the output of each input.

    Raises:
        UserError: one output would be that of several inputs, or is an input itself.
    """
    inputs = dict.fromkeys(map(whole, sources))  # all shards of a network are one index
    if output and len(inputs) > 1:
        raise UserError(
            f"-o {output} is for one input; without it each output lies beside its own."
        )
    jobs = {source: Path(output) if output else default_output(source) for source in inputs}
    for source, target in jobs.items():
        if any(target.resolve() == other.resolve() for other in inputs):
            raise UserError(f"{target}, for {source}, is itself an input; name another output.")
    if len(set(jobs.values())) < len(jobs):
        raise UserError(
            "two of these inputs would have one output; convert them one by one with -o."
        )
    return jobs


def _failure(error: Exception, files: str = "") -> int:
    """Say what went wrong, and return its status; only the system's errors lack the files."""
    status = 3 if isinstance(error, CheckpointError) else 4 if isinstance(error, OSError) else 1
    print(f"error: {printable(f'{files}{error}' if status == 4 else str(error))}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m harness.convert" if sys.argv[0].endswith("__main__.py") else None,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="SRC", help="checkpoints; folders of runs or of shards")
    add("-o", "--output", metavar="OUT", help="*.pt, *.pth, *.safetensors")
    add("--dtype", default="keep", choices=DTYPES, help="of floating tensors")
    add("--prefix", default="auto", metavar="NAME", help='the network\'s submodule; "" for all')
    add("--key", metavar="NAME", help="the file's entry of weights, a.b if nested; '' for all")
    ema = argparse.BooleanOptionalAction
    add("--ema", action=ema, default=True, help="prefer averaged weights where there are some")
    add("--list", action="store_true", help="list the tensors and write nothing")
    add("--force", action="store_true", help="replace existing outputs")
    return parser


if __name__ == "__main__":
    run()
