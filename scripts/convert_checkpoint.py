"""Turn training checkpoints into plain weights for the CPU.

    python scripts/convert_checkpoint.py last.ckpt -o weights.pt
    python scripts/convert_checkpoint.py last.ckpt -o weights.safetensors --dtype bfloat16
    python scripts/convert_checkpoint.py a.ckpt b.ckpt -o "{stem}.pt"   several in one call
    python scripts/convert_checkpoint.py outputs/                       all below, beside each
    python scripts/convert_checkpoint.py last.ckpt --list               what would be taken

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

from harness.convert import DTYPES, CheckpointError, Report, convert
from harness.convert.conversion import SUFFIXES, default_output, stem_of
from harness.convert.read import is_checkpoint_folder
from harness.convert.report import printable
from harness.errors import UserError

_OUTPUT = ".weights.pt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert what the arguments name and return the exit status."""
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
    results: list[dict[str, object]] = []
    status, jobs = 0, []
    try:
        jobs = _jobs(sources, output)
    except (UserError, OSError) as error:
        status = 4 if isinstance(error, OSError) else 1
        results.append({"error": str(error), "status": status})
        print(f"error: {error}", file=sys.stderr)
    for source, target in jobs:
        try:
            report = convert(source, target, **options)
        except (UserError, OSError) as error:
            code = (
                3 if isinstance(error, CheckpointError) else 4 if isinstance(error, OSError) else 1
            )
            message = f"{source} -> {target}: {error}" if code == 4 else str(error)
            results.append({"source": str(source), "error": message, "status": code})
            status = max(status, code)
            print(f"error: {message}", file=sys.stderr)
            continue
        results.append(asdict(report))
        if not as_json:
            print(_listing(report) if as_list else report)
    if as_json:
        print(json.dumps(results, indent=2))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="SRC", help="checkpoint files, or folders of them")
    add("-o", "--output", metavar="OUT", help="*.pt, *.pth, *.safetensors; {stem} is SRC's")
    add("--dtype", default="keep", choices=DTYPES, help="of floating tensors")
    add("--prefix", default="auto", metavar="NAME", help='the network\'s submodule; "" for all')
    add("--key", metavar="NAME", help="the entry of the file that holds the weights, a.b if nested")
    add("--no-ema", dest="ema", action="store_false", help="not the averaged weights")
    add("--keep-module", action="store_true", help="a real child of the network is called module")
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
        found += [source] if _is_checkpoint(source) else _below(source) or [source]
    found = list({path.absolute(): path for path in found}.values())
    if output:
        targets = [Path(output.replace("{stem}", stem_of(source))) for source in found]
    else:
        targets = [default_output(source) for source in found]
        # Of x.ckpt and x.pt in one folder, each keeps its whole name.
        targets = [
            target if targets.count(target) == 1 else source.with_name(f"{source.name}{_OUTPUT}")
            for source, target in zip(found, targets, strict=True)
        ]
    owners: dict[Path, Path] = {}
    inputs = {source.resolve() for source in found}
    for source, target in zip(found, targets, strict=True):
        real = target.resolve()
        if real in owners:
            hint = "convert one at a time" if output and "{stem}" in output else "put {stem} in -o"
            raise UserError(
                f"{target} would be written more than once, "
                f"for {owners[real]} and for {source}; {hint}"
            )
        owners[real] = source
        into = next((path for path in [real, *real.parents] if path in inputs), None)
        is_other = any(s != source and target.exists() and _is_same(s, target) for s in found)
        if is_other or (into and into != source.resolve() and (into == real or into.is_dir())):
            raise UserError(f"{target}, for {source}, is also an input; name another output")
    return list(zip(found, targets, strict=True))


def _below(folder: Path) -> list[Path]:
    """Return the checkpoints below a folder, without what this command wrote beside them."""
    paths = sorted(path for path in folder.rglob("*") if _is_input(path, folder))
    outputs = {
        path.with_name(f"{name}.weights{suffix}")
        for path in paths
        for name in (path.name, stem_of(path))
        for suffix in (".pt", ".pth", ".safetensors")
    }
    return [path for path in paths if path not in outputs]


def _is_checkpoint(path: Path) -> bool:
    return is_checkpoint_folder(path) if path.is_dir() else path.exists()


def _is_input(path: Path, folder: Path) -> bool:
    parents = (parent for parent in path.parents if parent.is_relative_to(folder))
    if any((parent / ".metadata").is_file() for parent in parents):
        return False
    return (path.is_file() and path.suffix in SUFFIXES) or (path.is_dir() and _is_checkpoint(path))


def _is_same(source: Path, target: Path) -> bool:
    return source.exists() and source.samefile(target)


def _listing(report: Report) -> str:
    width = max(len(name) for name in report.tensors)
    lines = [
        printable(f"  {name:{width}}  {entry.dtype} {entry.shape}  <- {entry.source}")
        for name, entry in report.tensors.items()
    ]
    return "\n".join([str(report), *lines])


def _stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)  # an exception, so that temporaries are removed


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _stop)
    for stream in (sys.stdout, sys.stderr):  # names may hold what the terminal has no letters for
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a TextIO
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # as of `--list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)
