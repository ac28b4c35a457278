"""Modules that the strategies treat unlike each other, trained under each of them.

    python -m tests_harness.strategies.kinds     print the table of docs/strategies.md

Each ends with the weights of one device or is refused in a sentence; test_kinds.py says which.
Called with a strategy and a file, the program is one process of a launch.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from harness.command.compose import compose
from harness.errors import UserError
from harness.run import mistakes
from tests_harness.conftest import ROOT
from tests_harness.strategies import parity

# The words of each strategy; those of a kind come on top. Two devices each, as in the commands.
STRATEGIES = {
    "cpu": ["strategy=cpu"],
    "dp(2)": ["strategy=dp", "trainer.devices=2"],
    "ddp(2)": ["strategy=ddp", "trainer.devices=2"],
    "ddp2(2x2)": ["strategy=ddp2", "trainer.devices=2", "trainer.num_nodes=2"],
}
SIZE, LENGTHS = 8, (9, 7, 8, 6, 5, 4, 3, 2)  # every device has another longest sample
PROGRAM = ("-m", "tests_harness.strategies.kinds")
OPTIMIZER = torch.optim.SGD


class Regression(pl.LightningModule):
    """Learns the target of a padded sequence by a forward that subclasses write."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The sum of the padded outputs of each sample, (B, 4)."""
        return self.head(self.padded(x, lengths).sum(1))

    def padded(self, x: Any, lengths: Any, total_length: int | None = None) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs = self.rnn(packed)[0]
        return pad_packed_sequence(outputs, batch_first=True, total_length=total_length)[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths, y = batch
        return F.mse_loss(self(x, lengths), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZER(self.parameters(), lr=0.1)


class OwnLongest(Regression):
    """Returns outputs that are as long as the longest sample that forward has seen."""

    def forward(self, x: Tensor, lengths: Any) -> Tensor:
        return self.padded(x, lengths)  # (B, T of these, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths, y = batch
        return F.mse_loss(self.head(self(x, lengths).sum(1)), y)


class TotalLength(OwnLongest):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.padded(x, lengths, total_length=x.shape[1])


class ListOfLengths(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths, y = batch
        return F.mse_loss(self(x, lengths.tolist()), y)


class Packed(Regression):
    """Takes a packed batch and returns one."""

    def forward(self, packed: Any) -> Any:
        return self.rnn(packed)[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths, y = batch
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, found = pad_packed_sequence(self(packed), batch_first=True)
        assert torch.equal(found, lengths)
        return F.mse_loss(self.head(outputs.sum(1)), y)


class Checkpointed(Regression):
    """Forgets the activations of a part, which is called once or twice."""

    def __init__(self, use_reentrant: bool, num_calls: int = 1) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.use_reentrant, self.num_calls = use_reentrant, num_calls

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = super().forward(x, lengths)
        for _ in range(self.num_calls):
            y = checkpoint(self.part, y, use_reentrant=self.use_reentrant)
        return y


class Unused(Regression):
    """Has a part that no step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.later = nn.Linear(4, 4)


class Adversaries(pl.LightningModule):
    """A GAN as Lightning's example writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(6, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _, y = batch
        optimizer_g, optimizer_d = self.optimizers()
        noise = x[:, 0]
        self.toggle_optimizer(optimizer_g)
        self.update(optimizer_g, F.softplus(-self.discriminator(self.generator(noise))).mean())
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        fake = self.discriminator(self.generator(noise).detach())
        self.update(optimizer_d, (F.softplus(fake) + F.softplus(-self.discriminator(y))).mean())
        self.untoggle_optimizer(optimizer_d)

    def update(self, optimizer: Any, loss: Tensor) -> None:
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [OPTIMIZER(m.parameters(), lr=0.1) for m in (self.generator, self.discriminator)]


@dataclass(frozen=True)
class Kind:
    """A module, the words that its command needs, and what refuses it."""

    make: Callable[[], pl.LightningModule]
    words: tuple[str, ...] = ()  # of the keys that a strategy has
    refused: tuple[str, ...] = ()
    says: str = ""


TWO_NETWORKS = "trainer.strategy.modules=[generator,discriminator]"
UNUSED = "trainer.strategy.find_unused_parameters=true"
SPLITTING, REDUCING = ("dp(2)", "ddp2(2x2)"), ("ddp(2)", "ddp2(2x2)")
KINDS = {
    "padded to the longest, summed in forward": Kind(Regression),
    "padded to the longest": Kind(
        OwnLongest, refused=SPLITTING, says="pad_packed_sequence(..., total_length=x.shape[1])"
    ),
    "padded to `total_length`": Kind(TotalLength),
    "lengths in a list": Kind(ListOfLengths, refused=SPLITTING, says="holds one number per sample"),
    "`PackedSequence` in and out": Kind(Packed),
    "checkpointing": Kind(lambda: Checkpointed(use_reentrant=False, num_calls=2)),
    "checkpointing, reentrant": Kind(
        lambda: Checkpointed(use_reentrant=True),
        refused=("ddp2(2x2)",),
        says="use_reentrant=False",
    ),
    "the same part twice, reentrant": Kind(
        lambda: Checkpointed(use_reentrant=True, num_calls=2),
        refused=REDUCING,
        says="use_reentrant=False",
    ),
    "parameters without a gradient": Kind(Unused, refused=REDUCING, says=f"set {UNUSED}"),
    "the same, `find_unused_parameters=true`": Kind(Unused, (UNUSED,)),
    "GAN": Kind(Adversaries, (TWO_NETWORKS,), REDUCING, f"set {UNUSED}"),
    "GAN, `find_unused_parameters=true`": Kind(Adversaries, (TWO_NETWORKS, UNUSED)),
}


def batches(num_ranks: int, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The share of a process in three batches: inputs (B, T, 6), lengths (B,), targets (B, 4)."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(3):
        x = torch.randn(SIZE, max(LENGTHS), 6, generator=generator, dtype=torch.float64)
        y = torch.randn(SIZE, 4, generator=generator, dtype=torch.float64)
        rows = torch.arange(SIZE).tensor_split(num_ranks)[rank]
        shares.append((x[rows], torch.tensor(LENGTHS)[rows], y[rows]))
    return shares


def outcome(kind: Kind, strategy: str) -> list[float] | str:
    """The weights after two epochs, or what a command would say instead."""
    words = STRATEGIES[strategy]
    keys = {"dp(2)": {"modules"}, "ddp(2)": {"find_unused_parameters"}, "cpu": set[str]()}
    has = keys.get(strategy, {"modules", "find_unused_parameters"})
    words = [*words, *(w for w in kind.words if w.partition("=")[0].rpartition(".")[2] in has)]
    cfg = compose("train", words, ROOT / "conf").trainer
    torch.manual_seed(1)
    module = kind.make()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=cfg.strategy if strategy == "cpu" else instantiate(cfg.strategy, _convert_="all"),
        devices=cfg.devices,
        num_nodes=cfg.num_nodes,
        max_epochs=2,
        precision="64-true",
        use_distributed_sampler=False,
        **dict.fromkeys(["logger", "enable_checkpointing"], False),
        **dict.fromkeys(["enable_progress_bar", "enable_model_summary"], False),
    )
    shares = {"num_replicas": 1, "rank": 0} | (trainer.distributed_sampler_kwargs or {})
    data = batches(shares["num_replicas"], shares["rank"])
    try:
        trainer.fit(module, DataLoader(data, batch_size=None))
    except UserError as error:
        return str(error)
    except Exception as error:
        return mistakes.of_owner(error) or f"Traceback: {error}"
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def measure(strategy: str, folder: Path) -> dict[str, list[float] | str]:
    """The outcomes of all kinds under a strategy, in processes of its own where it has several."""
    file = folder / "outcomes.json"
    if strategy.startswith("ddp"):
        command = (strategy, str(file))
        by_hand = parity.nodes_by_variables(*command, program=PROGRAM)
        one_node = parity.torchrun(1, 2, *command, program=PROGRAM)
        parity.launch(by_hand if "2x2" in strategy else one_node)
    else:
        write_outcomes(strategy, file)
    outcomes: dict[str, list[float] | str] = json.loads(file.read_text())
    return outcomes


def write_outcomes(strategy: str, file: Path) -> None:
    outcomes = {name: outcome(kind, strategy) for name, kind in KINDS.items()}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        file.write_text(json.dumps(outcomes))


def difference(found: list[float] | str, expected: list[float] | str) -> float:
    """The largest difference of a weight."""
    assert not isinstance(found, str), found
    assert not isinstance(expected, str), expected
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def print_table() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {strategy: measure(strategy, Path(folder)) for strategy in STRATEGIES}
    print("| largest difference of a weight |", " | ".join([*STRATEGIES][1:]), "|")
    print("|" + "---|" * len(STRATEGIES))
    for name, kind in KINDS.items():
        row = [
            "refused"
            if strategy in kind.refused
            else f"{difference(found[strategy][name], found['cpu'][name]):.1e}"
            for strategy in [*STRATEGIES][1:]
        ]
        print(f"| {name} |", " | ".join(row), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("strategy", nargs="?", choices=STRATEGIES, help="of one process")
    parser.add_argument("file", nargs="?", type=Path, help="where the outcomes go")
    arguments = parser.parse_args()
    if arguments.strategy is None:
        print_table()
    else:
        write_outcomes(arguments.strategy, arguments.file)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
