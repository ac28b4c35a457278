"""Turn training checkpoints into plain weights for the CPU.

    python -m harness.convert last.ckpt -o weights.pt
    python -m harness.convert last.ckpt -o weights.safetensors --dtype bfloat16
    python -m harness.convert a.ckpt b.ckpt -o "{stem}.pt"   several in one call
    python -m harness.convert last.ckpt --list               what would be taken

and then, anywhere: net.load_state_dict(torch.load("weights.pt")). Nothing in a checkpoint is
executed. harness/docs/checkpoints.md says which formats are read and what is verified.

Exit status: 0 all converted; 1 a mistake in the command; 2 unknown options; 3 an input is not a
checkpoint, is damaged, or cannot be converted; 4 the system refused to read or write (disk full,
permissions); 129, 130, 143 stopped by a signal (hang-up, Ctrl-C, SIGTERM). Of several inputs all
are tried, and the highest status is returned.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError

from .checkpoint import stem_of, whole
from .conversion import DTYPES, convert, default_output
from .names import printable, quoted
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
        pairs = _jobs(sources, output)
    except (UserError, OSError) as error:
        return _failure(error)
    status = 0
    for source, target in pairs:
        try:
            report = convert(source, target, dry_run=as_list, **options)
        except (UserError, OSError) as error:
            status = max(status, _failure(error, f"{source} -> {target}: "))
            continue
        print(report, *[report.listing()] * as_list, sep="\n", flush=True)
    return status


def _jobs(sources: Sequence[str], output: str | None) -> list[tuple[Path, Path]]:
    """Pair each checkpoint with its output.

    Raises:
        UserError: an input does not exist, or an output is also an input, or that of two.
    """
    if missing := next((source for source in sources if not Path(source).exists()), None):
        hint = "; an output has -o before it" if len(sources) > 1 else ""
        raise UserError(f"{missing} does not exist{hint}.")
    inputs = {path.resolve(): path for path in map(whole, sources)}
    outputs: dict[Path, tuple[Path, Path]] = {}
    for source in inputs.values():
        target = default_output(source)
        if output:
            target = Path(output.replace("{stem}", stem_of(source)))
        if target.resolve() in outputs:
            hint = f"-o {quoted('{stem}' + target.suffix)} gives each its own"
            raise UserError(f"{target} would be written more than once; {hint}")
        if inputs.get(target.resolve(), source) is not source:
            raise UserError(f"{target}, for {source}, is also an input; name another output")
        outputs[target.resolve()] = source, target
    return list(outputs.values())


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
    add("sources", nargs="+", metavar="SRC", help="checkpoints: files, or folders that are one")
    add("-o", "--output", metavar="OUT", help="*.pt, *.pth, *.safetensors; {stem} is SRC's")
    add("--dtype", default="keep", choices=DTYPES, help="of floating tensors")
    add("--prefix", default="auto", metavar="NAME", help='the network\'s submodule; "" for all')
    add("--key", metavar="NAME", help="the file's entry of weights, a.b if nested; '' for all")
    ema = argparse.BooleanOptionalAction
    add("--ema", action=ema, default=True, help="prefer averaged weights where there are some")
    add("--no-verify", dest="verify", action="store_false", help="do not read the result again")
    add("--list", action="store_true", help="list the tensors and write nothing")
    add("--force", action="store_true", help="replace existing outputs")
    return parser


if __name__ == "__main__":
    run()
