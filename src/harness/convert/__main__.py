"""Turn training checkpoints into plain weights for the CPU.

    python -m harness.convert last.ckpt -o weights.pt
    python -m harness.convert last.ckpt -o weights.safetensors --dtype bfloat16
    python -m harness.convert a.ckpt b.ckpt -o "{stem}.pt"   several in one call
    python -m harness.convert outputs/                       all below, beside each
    python -m harness.convert last.ckpt --list               what would be taken

and then, anywhere: net.load_state_dict(torch.load("weights.pt")). Nothing in a checkpoint is
executed. docs/checkpoints.md says which formats are read and what is verified.

Exit status: 0 all converted; 1 a mistake in the command; 2 unknown options; 3 an input is not a
checkpoint, is damaged, or cannot be converted; 4 the system refused to read or write (disk full,
permissions); 129, 130, 143 stopped by a signal (hang-up, Ctrl-C, SIGTERM), 141 by the end of the
reader of its output. Of several inputs all are tried, and the highest status is returned.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.errors import UserError

from .conversion import DTYPES, OUTPUTS, convert
from .sources import SUFFIXES, is_checkpoint_folder, jobs, printable, quoted
from .tensors import CheckpointError


def run(packages: Sequence[str] = ()) -> None:
    """Be the command, with an orderly end whatever comes.

    Args:
        packages: whose networks may be built, besides those that the command line names.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _stop)
    for stream in (sys.stdout, sys.stderr):  # names may hold what the terminal has no letters for
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a TextIO
    options = vars(_parser().parse_args())
    options["packages"] += packages
    try:
        status = _convert_all(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `--list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except OSError as error:  # as of `> /dev/full`
        status = int(_failure(error)["status"])
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)  # an exception, so that temporaries are removed


def _convert_all(options: dict[str, Any]) -> int:
    """Convert what the command line names and return the exit status."""
    sources, output = options.pop("sources"), options.pop("output")
    as_json, as_list = options.pop("json"), options.pop("list")
    options["dry_run"] |= as_list
    results: list[dict[str, Any]] = []
    pairs: list[tuple[Path, Path]] = []
    try:
        if not output:
            _refuse_target(sources)
        pairs = jobs(sources, output)
    except (UserError, OSError) as error:
        results.append(_failure(error))
    for source, target in pairs:
        try:
            report = convert(source, target, **options)
        except (UserError, OSError) as error:
            results.append({"source": str(source), **_failure(error, f"{source} -> {target}: ")})
            continue
        results.append(asdict(report))
        if not as_json:
            print(report, *[report.listing()] * as_list, sep="\n")
    if as_json:
        print(json.dumps(results, indent=2))
    return max(int(result.get("status", 0)) for result in results)


def _failure(error: Exception, files: str = "") -> dict[str, Any]:
    """Say what went wrong, and return it for programs; only the system's errors lack the files."""
    status = 3 if isinstance(error, CheckpointError) else 4 if isinstance(error, OSError) else 1
    message = printable(f"{files}{error}" if status == 4 else str(error))
    print(f"error: {message}", file=sys.stderr)
    return {"error": message, "status": status}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="SRC", help="checkpoint files, or folders of them")
    add("-o", "--output", metavar="OUT", help="*.pt, *.pth, *.safetensors; {stem} is SRC's")
    add("--dtype", default="keep", choices=DTYPES, help="of floating tensors")
    add("--prefix", default="auto", metavar="NAME", help='the network\'s submodule; "" for all')
    add("--key", metavar="NAME", help="the file's entry of weights, a.b if nested; '' for all")
    add("--no-ema", dest="ema", action="store_false", help="not the averaged weights")
    add("--keep-module", action="store_true", help="a real child of the network is called module")
    help_ = "a package of yours: its networks may be built, to hold weights against them"
    add("--package", dest="packages", action="append", default=[], metavar="NAME", help=help_)
    add("--no-verify", dest="verify", action="store_false", help="do not read the result again")
    add("--list", action="store_true", help="list the tensors and write nothing")
    add("--dry-run", action="store_true", help="write nothing")
    add("--force", action="store_true", help="replace existing outputs")
    help_ = "refuse a result that is 100 MB and this many times larger than its source (16)"
    add("--max-expansion", type=float, default=16, metavar="TIMES", help=help_)
    add("--json", action="store_true", help="report as JSON")
    return parser


def _refuse_target(sources: Sequence[str]) -> None:
    """Raise a UserError if the last of several inputs is meant as the output, as of cp."""
    last = Path(sources[-1])
    is_folder = last.is_dir() and not is_checkpoint_folder(last) and not any(last.iterdir())
    is_new = not os.path.lexists(last) and (last.suffix in OUTPUTS or last.suffix not in SUFFIXES)
    if len(sources) == 1 or not (is_folder or is_new):
        return
    suffix = last.suffix if last.suffix in OUTPUTS else ".pt"
    is_file = is_new and not sources[-1].endswith("/")
    if is_file and len(jobs(sources[:-1], None)) == 1:
        target = last.with_name(last.name.removesuffix(suffix) + suffix)
    else:
        target = (last.parent if is_file else last) / f"{{stem}}{suffix}"
    name = "-m harness.convert" if sys.argv[0].endswith("__main__.py") else quoted(sys.argv[0])
    others = " ".join(quoted(word) for word in sys.argv[1:] if word != sources[-1])
    folder = "" if target.parent.exists() else f"mkdir -p {quoted(target.parent)} && "
    what = "is an empty folder" if is_folder else "does not exist"
    raise UserError(
        f"{last} {what}; an output has -o before it: "
        f"{folder}python {name} {others} -o {quoted(target)}"
    )


if __name__ == "__main__":
    run()
