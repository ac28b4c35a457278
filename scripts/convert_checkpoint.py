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
permissions). Of several inputs all are tried, and the highest status is returned.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from project.convert import DTYPES, CheckpointError, Report, convert
from project.convert.report import printable
from project.errors import UserError

_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert what the arguments name and return the exit status."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    sources, output = options.pop("sources"), options.pop("output")
    as_json, as_list = options.pop("json"), options.pop("list")
    options["dry_run"] |= as_list
    results, status = [], 0
    try:
        jobs = _jobs(sources, output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for source, target in jobs:
        try:
            report = convert(source, target, **options)
            results.append(asdict(report))
            if not as_json:
                print(_listing(report) if as_list else report)
        except (UserError, OSError) as error:
            code = (
                3 if isinstance(error, CheckpointError) else 4 if isinstance(error, OSError) else 1
            )
            message = f"{source} -> {target}: {error}" if code == 4 else str(error)
            results.append({"source": str(source), "error": message, "status": code})
            status = max(status, code)
            print(f"error: {message}", file=sys.stderr)
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
        below = [] if _is_checkpoint(source) else sorted(filter(_is_input, source.rglob("*")))
        found += below or [source]
    name = output or "{stem}.weights.pt"
    jobs = []
    for source in found:
        target = Path(name.replace("{stem}", source.stem))
        jobs.append((source, target if output else source.with_name(target.name)))
    targets = [target for _, target in jobs]
    if twice := next((target for target in targets if targets.count(target) > 1), None):
        raise UserError(f"{twice} would be written more than once; put {{stem}} in -o, or leave it")
    return jobs


def _is_checkpoint(path: Path) -> bool:
    return path.is_file() or (path / ".metadata").is_file() or (path / "latest").is_file()


def _is_input(path: Path) -> bool:
    inside = any((parent / ".metadata").is_file() for parent in path.parents)
    return path.suffix in _SUFFIXES and ".weights." not in path.name and not inside


def _listing(report: Report) -> str:
    width = max(len(name) for name in report.tensors)
    lines = [
        printable(f"  {name:{width}}  {entry.dtype} {entry.shape}  <- {entry.source}")
        for name, entry in report.tensors.items()
    ]
    return "\n".join([str(report), *lines])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporaries are removed
    sys.exit(main())
