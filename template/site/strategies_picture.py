"""Draw harness/docs/strategies.png: one experiment under each strategy, on the CPU.

    python -m template.site.strategies_picture

Left: the training losses, which lie on each other. Right: how far each differs from one process.
"""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from template.site.markdown import ROOT

STRATEGIES = {
    "one process": ["strategy=cpu"],
    "dp, 2 devices": ["strategy=dp", "trainer.devices=2"],
    "ddp, 2 processes": ["strategy=ddp", "trainer.devices=2"],
    "ddp, 3 processes": ["strategy=ddp", "trainer.devices=3"],
    "ddp2, 2 devices": ["strategy=ddp2", "trainer.devices=2"],
    "fsdp, 2 processes": ["strategy=fsdp", "trainer.devices=2"],
}
SETTINGS = ["trainer.accelerator=cpu", "trainer.max_epochs=10", "trainer.log_every_n_steps=1"]
SETTINGS += ["trainer.enable_progress_bar=false", "test=false", "watch=none"]


def losses(overrides: list[str]) -> list[float]:
    """Train, and return the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *SETTINGS, *overrides, f"output_dir={folder}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(folder).glob("*/*/metrics.csv")
        with file.open() as rows:
            values = [
                row.get("train/loss_step") or row["train/loss"] for row in csv.DictReader(rows)
            ]
    return [float(value) for value in values if value]


def main() -> None:
    """Train under each strategy, and draw."""
    mpl.use("Agg")
    curves = {name: losses(overrides) for name, overrides in STRATEGIES.items()}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    baseline, *_ = curves.values()
    for number, (name, values) in enumerate(curves.items()):
        width = 1.5 * (len(curves) - number)
        left.plot(values, label=name, linewidth=width, color=f"C{number}")
        if values is not baseline:
            apart = [abs(a - b) for a, b in zip(values, baseline, strict=True)]
            right.plot(apart, label=name, color=f"C{number}", linewidth=1)
            print(f"{name}: at most {max(apart):.1e}")
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    right.set(xlabel="step", ylabel="difference from one process", yscale="log", ylim=(1e-9, 1))
    left.legend(fontsize=8)
    figure.savefig(ROOT / "harness" / "docs" / "strategies.png", dpi=110)


if __name__ == "__main__":
    main()
