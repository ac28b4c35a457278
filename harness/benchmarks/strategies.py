"""Is it the same experiment? Whole runs under every strategy, against one device.

    python benchmarks/strategies.py [--json strategies.json] [--picture docs/strategies.png]

Three epochs of digits with an odd batch size: uneven shares, a smaller last batch, augmentation,
a schedule. Prints the largest difference of any weight at the end, and of the test loss; draws
the learning curves. ddp2(2x2) are two processes with two devices each, joined over loopback.
"""

import argparse
import csv
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import contest
import torch
from matplotlib.figure import Figure

ROOT = contest.ROOT
STRATEGIES = {
    "cpu": ["strategy=cpu"],
    "dp(2)": ["strategy=dp", "trainer.devices=2"],
    "ddp(2)": ["strategy=ddp", "trainer.devices=2"],
    "ddp2(2x2)": ["strategy=ddp2", "trainer.devices=2", "trainer.num_nodes=2"],
}
SGD = ["model.optimizer._target_=torch.optim.SGD", "model.optimizer.lr=0.1"]
SETTINGS = {
    "AdamW, fp64": ["trainer.precision=64-true"],
    "SGD, fp64": [*SGD, "trainer.precision=64-true"],
    "AdamW, fp32": [],
    "SGD, fp32": SGD,
}
COMMON = [
    *("trainer.accelerator=cpu", "trainer.max_epochs=3", "data.batch_size=37"),
    *("trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false"),
]


def run(strategy: str, overrides: list[str], folder: Path) -> Path:
    """Train; return the run's folder."""
    command = [sys.executable, "train.py", *STRATEGIES[strategy], *COMMON, *overrides]
    command.append(f'output_dir="{folder}"')
    environments = [os.environ | {"OMP_NUM_THREADS": "1"}]
    if strategy.startswith("ddp2"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        environments = [environments[0] | address | {"NODE_RANK": str(rank)} for rank in (0, 1)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        for environment in environments
    ]
    assert all(process.wait() == 0 for process in processes), command
    (run_dir,) = (folder / "default").iterdir()
    return run_dir


def weights(run_dir: Path) -> torch.Tensor:
    """All weights of the network after the last step, in one vector."""
    path = run_dir / "checkpoints" / "last.ckpt"
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    values = [value.flatten().double() for key, value in state.items() if key.startswith("net.")]
    return torch.cat(values)


def test_loss(run_dir: Path) -> float:
    return float(json.loads((run_dir / "results.json").read_text())["test/loss"])


def curve(run_dir: Path) -> tuple[list[int], list[float]]:
    """Steps and training losses of a run."""
    with (run_dir / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    return [int(row["step"]) for row in rows], [float(row["train/loss"]) for row in rows]


def draw(runs: dict[str, Path], picture: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss", yscale="log")
    for i, (strategy, run_dir) in enumerate(runs.items()):
        # Wide to narrow: a curve that lay beside the others would show.
        axes.plot(*curve(run_dir), label=strategy, linewidth=9 - 2.3 * i, alpha=0.8)
    axes.legend()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    print("| against one device | strategy | largest difference of a weight | of the test loss |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for setting, overrides in SETTINGS.items():
            runs = {
                strategy: run(
                    strategy, overrides, Path(temporary, setting.replace(", ", "_"), strategy)
                )
                for strategy in STRATEGIES
            }
            one = runs["cpu"]
            results[setting] = {}
            for strategy, run_dir in runs.items():
                difference = float((weights(run_dir) - weights(one)).abs().max())
                loss = abs(test_loss(run_dir) - test_loss(one))
                results[setting][strategy] = {"weights": difference, "test_loss": loss}
                if strategy != "cpu":
                    print(f"| {setting} | {strategy} | {difference:.1e} | {loss:.1e} |", flush=True)
            if arguments.picture and setting == "AdamW, fp32":
                draw(runs, arguments.picture)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
