"""Measure what the first-batch check costs at the start of a run: seconds, and memory at its peak.

python benchmarks/first_batch.py
"""

import argparse
import resource
import time
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness.exact.first_batch import in_child
from harness.exact.first_batch_check import check_first_batch
from harness.exact.global_batches import GlobalBatches


def cnn() -> nn.Module:
    """Eight convolutions, 0.6 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2, 1)]
    for _ in range(8):
        layers += [nn.GELU(), nn.Conv2d(64, 64, 3, 1, 1), nn.GroupNorm(8, 64)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def transformer() -> nn.Module:
    """Eight layers of 512, 25 million parameters."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(512 * 64, 10))


KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "tiny": (lambda: nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 10)), (6,)),
    "CNN": (cnn, (3, 32, 32)),
    "transformer": (transformer, (64, 512)),
}


class Checked(pl.LightningModule):
    """Measures the check before its first step."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net, self.shape = net, shape

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(256, *self.shape), torch.randint(0, 10, (256,)))
        return DataLoader(data, 64, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name in ("first", "again"):
            before, start = peak_mib(resource.RUSAGE_SELF), time.perf_counter()
            check = partial(check_first_batch, self, self.trainer.train_dataloader)
            found = in_child(check) if self.device.type == "cpu" else check()
            assert not found, found
            seconds, more = time.perf_counter() - start, peak_mib(resource.RUSAGE_CHILDREN) - before
            size = sum(p.numel() * p.element_size() for p in self.parameters()) / 2**20
            print(f"| {name} | {seconds:.2f} s | {more:.0f} MiB more | {size:.1f} MiB of weights |")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def peak_mib(who: int) -> float:
    """The most memory of the GPU, or else of this process or of its children on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(who).ru_maxrss / 2**10


def main() -> None:
    """Print a line for each network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=[*KINDS])
    for kind in parser.parse_args().kinds:
        make, shape = KINDS[kind]
        print(f"{kind}:")
        trainer = pl.Trainer(
            devices=1,
            max_steps=1,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[GlobalBatches(seed=0)],
        )
        trainer.fit(Checked(make(), shape))


if __name__ == "__main__":
    main()
