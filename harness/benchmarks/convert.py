"""Time and memory of the checkpoint converter beside `cp` and beside torch.load + torch.save.

    python benchmarks/convert.py                      2 GB of weights, 4 GB of optimizer state
    python benchmarks/convert.py --gigabytes 0.2      smaller, and as telling above the noise
    python benchmarks/convert.py --json result.json   every measurement, for a later comparison

Makes its checkpoint in a temporary folder (three times the weights' size, and once more for each
output) and removes it. The contenders take turns, so that a slow minute of the machine meets all
of them; each is a fresh process, timed from its start until its output is on the disk. The
checkpoint is in the page cache, as after training. `cp` copies a file of the weights alone.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import harness

CONVERT = [sys.executable, "-m", "harness.convert", "run.ckpt", "--force", "-o"]
NAIVE = """
import os, torch
state = torch.load("run.ckpt", map_location="cpu", weights_only=True)["state_dict"]
state = {name.replace("net._orig_mod.module.", ""): value for name, value in state.items()}
torch.save(state, "naive.pt")
os.fsync(os.open("naive.pt", os.O_RDONLY))
"""
CONTENDERS = {
    "cp + sync": ["sh", "-c", "cp weights.pt cp.pt && sync cp.pt"],
    "converter, --no-verify": [*CONVERT, "unverified.pt", "--no-verify"],
    "converter": [*CONVERT, "verified.pt"],
    "converter, to .safetensors": [*CONVERT, "verified.safetensors"],
    "torch.load + torch.save": [sys.executable, "-c", NAIVE],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to make the files; by default the temporary one")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    options = parser.parse_args()
    if not 1e-6 <= options.gigabytes <= 1e4 or options.rounds < 1:
        parser.exit(2, "error: --gigabytes is from 0.000001 to 10000, --rounds at least 1\n")
    if options.folder and not Path(options.folder).is_dir():
        parser.exit(2, f"error: {options.folder} is not a folder\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        make_checkpoint(Path(folder), options.gigabytes)
        runs = measure(Path(folder), options.rounds)
    result = {"machine": machine(), "gigabytes": options.gigabytes, "runs": runs}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Save a Lightning checkpoint of a compiled DDP network with Adam, and its weights alone.

    A child process does it: the largest resident memory of a process is inherited by the
    contenders that it starts, until they load their own program.
    """
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import convert
convert.save({gigabytes})
"""
    run([sys.executable, "-c", code], folder)


def save(gigabytes: float) -> None:
    """Write run.ckpt and weights.pt into the current folder."""
    import torch

    num_blocks = 30
    width = int((gigabytes * 1e9 / 4 / num_blocks) ** 0.5)
    shapes = {}
    for i in range(num_blocks):
        shapes[f"blocks.{i}.norm.weight"] = (width,)
        shapes[f"blocks.{i}.linear.weight"] = (width, width)
    weights = {name: torch.rand(shape) for name, shape in shapes.items()}
    torch.save(weights, "weights.pt")
    moments = [{"exp_avg": w * 2, "exp_avg_sq": w * 3} for w in weights.values()]
    checkpoint = {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"net._orig_mod.module.{name}": w for name, w in weights.items()},
        "optimizer_states": [{"state": dict(enumerate(moments)), "param_groups": []}],
    }
    torch.save(checkpoint, "run.ckpt")


def measure(folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return each contender's runs: seconds, and the peak of its resident memory in MiB."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, command in CONTENDERS.items():
            (folder / "run.ckpt").open("rb").close()
            os.sync()  # nobody pays for the writes of the one before
            runs[name].append(run(command, folder))
            for output in [*folder.glob("*.pt"), *folder.glob("*.safetensors")]:
                if output.name != "weights.pt":
                    output.unlink()
    return runs


def run(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command to its end."""
    package = str(Path(harness.__path__[0]).parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": package}
    start = time.perf_counter()
    child = os.posix_spawnp(
        "sh", ["sh", "-c", 'cd "$0" && exec "$@" > /dev/null', str(folder), *command], environment
    )
    _, status, usage = os.wait4(child, 0)
    wall_seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{command} failed")
    return {"wall_seconds": wall_seconds, "peak_mib": usage.ru_maxrss / 1024}


def machine() -> str:
    """Return the processor, the cores, the memory and the versions in a line."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(": ")[2]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = f"Python {platform.python_version()}, Linux {platform.release().split('-')[0]}"
    return f"{os.cpu_count()} cores of {cpu}, {memory:.0f} GiB of memory, {versions}"


def table(result: dict[str, object]) -> str:
    """Return medians with the smallest and the largest, as a table in Markdown."""
    runs = result["runs"]
    baseline = statistics.median(r["wall_seconds"] for r in runs["cp + sync"])
    lines = [
        f"{result['gigabytes']} GB of weights, {2 * result['gigabytes']} GB of optimizer state; "
        f"{len(runs['cp + sync'])} interleaved runs; {result['machine']}",
        "",
        "| | seconds, median (min-max) | of cp | peak memory, MiB |",
        "| --- | --- | --- | --- |",
    ]
    for name, measured in runs.items():
        seconds = sorted(r["wall_seconds"] for r in measured)
        median = statistics.median(seconds)
        peak = max(r["peak_mib"] for r in measured)
        lines.append(
            f"| {name} | {median:.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f}) "
            f"| {median / baseline:.2f} | {peak:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
