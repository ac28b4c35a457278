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
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.errors import UserError

from .conversion import DTYPES, SUFFIXES, convert, default_output, stem_of
from .read import is_checkpoint_folder
from .tensors import CheckpointError


def main(arguments: Sequence[str] | None = None, packages: Sequence[str] = ()) -> int:
    """Convert what the arguments name and return the exit status.

    Args:
        arguments: of the command line; by default those of this process.
        packages: whose networks may be built, besides those that the arguments name.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = vars(_parser().parse_args(arguments))
    except SystemExit as error:
        if error.code and "--json" in arguments:
            print(json.dumps([{"error": "unknown options", "status": error.code}], indent=2))
        raise
    sources, output = options.pop("sources"), options.pop("output")
    as_json, as_list = options.pop("json"), options.pop("list")
    options["dry_run"] |= as_list
    options["packages"] += packages
    results: list[dict[str, Any]] = []
    jobs: list[tuple[Path, Path]] = []
    try:
        jobs = _jobs(sources, output)
    except (UserError, OSError) as error:
        results.append(_failure(error))
    for source, target in jobs:
        try:
            report = convert(source, target, **options)
        except (UserError, OSError) as error:
            results.append(_failure(error, source, target))
            continue
        results.append(asdict(report))
        if not as_json:
            print(report, *[report.listing()] * as_list, sep="\n")
    if as_json:
        print(json.dumps(results, indent=2))
    return max(int(result.get("status", 0)) for result in results)


def run(packages: Sequence[str] = ()) -> None:
    """Be the command: `main`, and an orderly end whatever comes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _stop)
    for stream in (sys.stdout, sys.stderr):  # names may hold what the terminal has no letters for
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a TextIO
    try:
        status = main(packages=packages)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `--list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)


def _stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)  # an exception, so that temporaries are removed


def _failure(
    error: Exception, source: Path | None = None, target: Path | None = None
) -> dict[str, object]:
    """Say what went wrong, and return it for programs."""
    status = 3 if isinstance(error, CheckpointError) else 4 if isinstance(error, OSError) else 1
    message = f"{source} -> {target}: {error}" if source and status == 4 else str(error)
    print(f"error: {message}", file=sys.stderr)
    return {**({"source": str(source)} if source else {}), "error": message, "status": status}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="SRC", help="checkpoint files, or folders of them")
    add("-o", "--output", metavar="OUT", help="*.pt, *.pth, *.safetensors; {stem} is SRC's")
    add("--dtype", default="keep", choices=DTYPES, help="of floating tensors")
    add("--prefix", default="auto", metavar="NAME", help='the network\'s submodule; "" for all')
    add("--key", metavar="NAME", help="the entry of the file that holds the weights, a.b if nested")
    add("--no-ema", dest="ema", action="store_false", help="not the averaged weights")
    add("--keep-module", action="store_true", help="a real child of the network is called module")
    help_ = "a package of yours: its networks may be built, to hold weights against them"
    add("--package", dest="packages", action="append", default=[], metavar="NAME", help=help_)
    add("--no-verify", dest="verify", action="store_false", help="do not read the result again")
    add("--list", action="store_true", help="list the tensors and write nothing")
    add("--dry-run", action="store_true", help="write nothing")
    add("--force", action="store_true", help="replace existing outputs")
    add("--json", action="store_true", help="report as JSON")
    return parser


def _jobs(sources: Sequence[str], output: str | None) -> list[tuple[Path, Path]]:
    """Pair each source with its output; a folder stands for the checkpoints below it."""
    found: list[Path] = []
    for source in map(Path, sources):
        is_search = source.is_dir() and not is_checkpoint_folder(source)
        found += (_below(source) if is_search else []) or [source]
    found = list({path.absolute(): path for path in found}.values())
    if output:
        targets = [Path(output.replace("{stem}", stem_of(source))) for source in found]
    else:
        targets = [default_output(source) for source in found]
        counts = Counter(targets)
        for i, source in enumerate(found):  # of x.ckpt and x.pt each keeps its whole name
            if counts[targets[i]] > 1:
                targets[i] = source.with_name(f"{source.name}.weights.pt")
    inputs = {_identity(source): source for source in found if source.exists()}
    owners: dict[Path, Path] = {}
    for source, target in zip(found, targets, strict=True):
        real = target.resolve()
        owner = owners.setdefault(real, source)
        if owner is not source:
            hint = "convert one at a time" if output and "{stem}" in output else "put {stem} in -o"
            raise UserError(
                f"{target} would be written more than once, for {owner} and for {source}; {hint}"
            )
        places = [_identity(path) for path in (real, *real.parents) if path.exists()]
        if any(inputs.get(place, source) is not source for place in places):
            raise UserError(f"{target}, for {source}, is also an input; name another output")
    return list(zip(found, targets, strict=True))


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _below(folder: Path) -> list[Path]:
    """Return the checkpoints below a folder, without what this command wrote beside them."""
    shards = {path.parent for path in folder.rglob(".metadata")}  # of distributed checkpoints
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if (path.is_file() and path.suffix in SUFFIXES) or is_checkpoint_folder(path)
        if shards.isdisjoint(path.parents)
    ]
    outputs = {
        path.with_name(f"{name}.weights{suffix}")
        for path in paths
        for name in (path.name, stem_of(path))
        for suffix in (".pt", ".pth", ".safetensors")
    }
    return [path for path in paths if path not in outputs]
