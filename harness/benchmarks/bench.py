"""Run the benchmarks one after the other, write their figures as JSON, and compare two commits.

    python benchmarks/bench.py [--only NAME ...] [--json FILE] [--base COMMIT] [--repeats 3]

With --base, this checkout and a checkout of that commit take turns. The table then shows the ratio
of their figures within each turn. The commit must have this program.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import contest

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "build" / "bench-base"
WORKTREE = ("git", "-C", REPOSITORY, "worktree")
# Short versions, which take some minutes together. The options of the whole ones are in README.md.
PROGRAMS = {
    "startup": "startup.py --repeats 2",
    "checkpoint": "checkpoint.py --repeats 3",
    "convert": "convert.py --repeats 2 --gigabytes 0.2",
    "mlp": "overhead.py --repeats 3 --num-train 12800",
    "cnn": "overhead.py --repeats 2 --num-train 3840 --network cnn",
    "ddp": "ddp.py --repeats 1 --num-train 12800",
    "check": "ddp.py --check",
    "files": "strangers_files.py",
    "scale": "scale.py --repeats 1 --num-sizes 2",
    "input": "input.py --repeats 2",
}


def run(command: str, tree: Path) -> dict[str, list[float]]:
    """Run a benchmark of a checkout, and return its figures by "title: contender"."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.jsonl")
        environment = os.environ | {
            contest.FIGURES: str(file),
            "PYTHONPATH": str(tree / "harness" / "src"),
            "PYTHONUNBUFFERED": "1",
        }
        program, *options = command.split()
        words = [sys.executable, str(tree / "harness" / "benchmarks" / program), *options]
        subprocess.run(words, env=environment, check=True)
        lines = file.read_text().splitlines() if file.exists() else []
    tables = [json.loads(line) for line in lines]
    return {
        f"{table['title']}: {name}, {table['unit']}": values
        for table in tables
        for name, values in table["figures"].items()
    }


def check_out(commit: str) -> Path:
    """Check out a commit beside this one, and return its folder."""
    remove_base()
    subprocess.run([*WORKTREE, "add", "--quiet", "--detach", BASE, commit], check=True)
    if not (BASE / "harness" / "benchmarks" / Path(__file__).name).is_file():
        sys.exit(f"{commit} has no harness/benchmarks/{Path(__file__).name}. Choose a later one.")
    return BASE


def remove_base() -> None:
    """Remove the checkout of a commit, if there is one."""
    subprocess.run([*WORKTREE, "remove", "--force", BASE], capture_output=True, check=False)


def compare(names: list[str], repeats: int, base: Path) -> dict[str, list[float]]:
    """Let two checkouts take turns, print their ratios, and return this one's figures."""
    figures: dict[str, dict[str, list[float]]] = {"base": {}, "this": {}}
    for turn in range(repeats):
        for name in names:
            for tree, path in (("base", base), ("this", REPOSITORY)):
                print(f"\nturn {turn + 1} of {repeats}: {name} of {tree}", flush=True)
                for key, values in run(PROGRAMS[name], path).items():
                    figures[tree].setdefault(key, []).extend(values)
    print("\n| figure | base | this commit | this / base |\n|---|---|---|---|")
    for key, values in figures["this"].items():
        before = figures["base"].get(key, [])
        ratios = [value / old for value, old in zip(values, before, strict=False)]
        cells = [contest.spread(cell, 3) if cell else "none" for cell in (before, values, ratios)]
        print(f"| {key} | {' | '.join(cells)} |")
    return figures["this"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--json", type=Path, help="the file of the figures")
    parser.add_argument("--base", metavar="COMMIT", help="a commit to compare with")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each checkout")
    options = parser.parse_args()
    figures: dict[str, list[float]] = {}
    if options.base:
        try:
            figures = compare(options.only, options.repeats, check_out(options.base))
        finally:
            remove_base()
    else:
        for name in options.only:
            print(f"\npython harness/benchmarks/{PROGRAMS[name]}", flush=True)
            figures |= run(PROGRAMS[name], REPOSITORY)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
