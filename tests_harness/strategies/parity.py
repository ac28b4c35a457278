"""Train the same batches under every strategy and compare the loss of every step.

    python tests_harness/strategies/parity.py     print the table of docs/strategies.md

The largest difference to one device over 50 steps is what the table shows; test_parity.py
asserts the bounds. Called with a strategy and a file, the program is one process of a launch.
"""

import argparse
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.distributed
import torch.nn.functional as F
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset

from harness.strategies.ddp2 import DDP2Strategy
from harness.strategies.dp import DataParallelStrategy

NUM_STEPS = 50
SGD = functools.partial(torch.optim.SGD, lr=0.1)


@dataclass(frozen=True)
class Case:
    """What is trained, and how far a step's loss may be from that of one device."""

    batch_sizes: tuple[int, ...] = (24,) * 5  # of one epoch
    optimizer: Callable = SGD
    precision: str = "32-true"
    bound: float = 1e-6
    trainer: tuple = ()
    inputs: str = "plain"
    num_calls: int = 1
    network: Callable[[], nn.Module] = lambda: nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5)
    )


def with_batch_norm():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 5))


def compiled():
    return torch.compile(Case().network(), backend="aot_eager")


EXACT = functools.partial(Case, precision="64-true", bound=1e-12)
CASES = {
    "SGD": EXACT(),
    "Adam": EXACT(optimizer=functools.partial(torch.optim.Adam, lr=1e-2)),
    "last batch of 10": EXACT((30, 30, 10)),
    "last batch of 1": EXACT((30, 30, 1)),
    "accumulation": EXACT((30, 30, 30, 10), trainer=(("accumulate_grad_batches", 2),)),
    "clipping": EXACT(trainer=(("gradient_clip_val", 0.05),)),
    "torch.compile": EXACT(network=compiled),
    "nested inputs": EXACT((30, 30, 10), inputs="nested"),
    "three calls": EXACT((30, 30, 10), num_calls=3),
    "SGD, fp32": Case(),
    # bf16 keeps 8 bits: sums over parts of a batch round differently from those over the whole.
    "SGD, bf16-mixed": Case(precision="bf16-mixed", bound=5e-3),
}
BATCH_NORM = Case(precision="64-true", network=with_batch_norm)

STRATEGIES = {
    "one device": (lambda: "auto", 1, 1),
    "dp(2)": (DataParallelStrategy, 2, 1),
    "dp(3)": (DataParallelStrategy, 3, 1),
    "dp(4)": (DataParallelStrategy, 4, 1),
    "ddp(2)": (DDPStrategy, 2, 1),
    "ddp2(2x2)": (DDP2Strategy, 2, 2),
}


class Module(pl.LightningModule):
    """Knows nothing of the strategy, except that the loss of an uneven share is weighted."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.net = case, case.network()
        self.losses: list[float] = []

    def forward(self, inputs, *, gain=None, activation="none", scales=()):
        """Logits from a tensor, or from a nest of tensors and other values."""
        if activation == "none":
            return self.net(inputs)
        left, (right,) = inputs["parts"]
        hidden = getattr(torch, activation)(torch.cat([left, right], dim=1)) * gain * scales[0]
        return {"logits": (self.net(hidden), activation)}

    def training_step(self, batch, batch_idx):
        """Mean cross entropy of the process's share."""
        x, y, self.weight = batch
        loss = sum(F.cross_entropy(self.logits(x / (1 + i)), y) for i in range(self.case.num_calls))
        self.losses.append(loss.item() * self.weight)
        return loss

    def logits(self, x):
        if self.case.inputs == "plain":
            return self(x)
        nest = {"parts": [x[:, :3], (x[:, 3:],)]}
        gain = torch.full((1, 1), 1.5, dtype=x.dtype)  # the same for every sample
        return self(nest, gain=gain, activation="tanh", scales=(2.0, "unused"))["logits"][0]

    def on_before_backward(self, loss):
        weight = self.weight
        loss.register_hook(lambda gradient: gradient * weight)

    def configure_optimizers(self):
        return self.case.optimizer(self.parameters())


class Shares(Dataset):
    """The share of one of `num_ranks` processes in each batch of an epoch, with its weight."""

    def __init__(self, batch_sizes, num_ranks, rank):
        generator = torch.Generator().manual_seed(0)
        self.shares = []
        for size in batch_sizes:
            x = torch.randn(size, 8, generator=generator)
            y = x[:, :5].argmax(dim=1)
            rows = torch.arange(size).tensor_split(num_ranks)[rank]
            weight = len(rows) * num_ranks / size
            rows = rows if len(rows) else torch.tensor([0])  # counts for nothing
            self.shares.append((x[rows], y[rows], weight))

    def __len__(self):
        return len(self.shares)

    def __getitem__(self, i):
        return self.shares[i]


def train(case: Case, strategy: str) -> list[float]:
    """The loss of every global batch."""
    make_strategy, num_devices, num_nodes = STRATEGIES[strategy]
    torch.manual_seed(1)
    torch.compiler.reset()
    module = Module(case)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=make_strategy(),
        devices=num_devices,
        num_nodes=num_nodes,
        max_epochs=-1,
        max_steps=NUM_STEPS // dict(case.trainer).get("accumulate_grad_batches", 1),
        precision=case.precision,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **dict(case.trainer),
    )
    shares = {"num_replicas": 1, "rank": 0} | (trainer.distributed_sampler_kwargs or {})
    data = Shares(case.batch_sizes, shares["num_replicas"], shares["rank"])
    trainer.fit(module, DataLoader(data, batch_size=None))
    if not torch.distributed.is_initialized():
        return module.losses
    ranks: list[list[float]] = [[] for _ in range(shares["num_replicas"])]
    torch.distributed.all_gather_object(ranks, module.losses)
    return [sum(losses) / len(ranks) for losses in zip(*ranks, strict=True)]


def difference(losses: list[float], reference: list[float]) -> float:
    """The largest difference over all steps."""
    assert len(losses) == len(reference) >= NUM_STEPS
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def launch(processes: list[tuple[list[str], dict[str, str]]], seconds: float = 500) -> None:
    """Run command lines with their environments at the same time; all must succeed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PYTEST_"))}
    running = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=clean | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments, environment in processes
    ]
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in running]
    finally:
        for process in running:
            process.terminate()  # torchrun ends its own processes, which a kill would leave behind
        for process in running:
            process.wait(timeout=60)
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output


def nodes_by_variables(*arguments: str) -> list[tuple[list[str], dict[str, str]]]:
    """Two nodes as a person starts them by hand."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [([__file__, *arguments], meeting | {"NODE_RANK": str(rank)}) for rank in range(2)]


def torchrun(num_processes: int, *arguments: str) -> list[tuple[list[str], dict[str, str]]]:
    """One agent with its own processes."""
    meeting = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    run = ["-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", *meeting]
    return [([*run, __file__, *arguments], {})]


def measure(strategy: str, folder: Path) -> dict[str, list[float]]:
    """The losses of cases under a strategy, in processes of its own where it has several."""
    file = folder / f"{strategy}.json"
    if strategy.startswith("ddp"):
        command = (strategy, str(file))
        launch(nodes_by_variables(*command) if "2x2" in strategy else torchrun(2, *command))
    else:
        write_losses(strategy, file)
    losses: dict[str, list[float]] = json.loads(file.read_text())
    return losses


def write_losses(strategy: str, file: Path) -> None:
    cases = CASES | {"BatchNorm": BATCH_NORM}
    losses = {name: train(case, strategy) for name, case in cases.items()}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        file.write_text(json.dumps(losses))


def print_table() -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = {strategy: measure(strategy, Path(folder)) for strategy in STRATEGIES}
    others = list(STRATEGIES)[1:]
    print("| largest difference in 50 steps |", " | ".join(others), "| bound |")
    print("|" + "---|" * (len(others) + 2))
    for name in losses["one device"]:
        reference = losses["one device"][name]
        row = [f"{difference(losses[strategy][name], reference):.1e}" for strategy in others]
        bound = f"{CASES[name].bound:.0e}" if name in CASES else "-"
        print(f"| {name} |", " | ".join(row), f"| {bound} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("strategy", nargs="?", choices=STRATEGIES, help="of one process")
    parser.add_argument("file", nargs="?", type=Path, help="where the losses go")
    arguments = parser.parse_args()
    if arguments.strategy is None:
        print_table()
    else:
        write_losses(arguments.strategy, arguments.file)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
