"""Train the same batches under dp, ddp2 and on one device: the loss of each step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.exact.global_batches import GlobalBatches
from harness.strategies.dp import DataParallelStrategy

NUM_STEPS = 50
SGD = functools.partial(torch.optim.SGD, lr=0.1)
UPSTREAM_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        # Lightning 2.6 walks batches with names that torch 2.13 calls old.
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        # The trainers of these tests are small on purpose.
        "The '.*_dataloader' does not have many workers",
        "`max_epochs` was not set",
        "You are using a custom batch sampler",
        # Dynamo hides this warning of its own, but not where warnings are errors.
        "The .grad attribute of a Tensor that is not a leaf",
    )
]


@dataclass(frozen=True)
class Case:
    """What is trained, and how far a step's loss may be from that of one device."""

    batch_sizes: tuple[int, ...] = (24,) * 5  # of one epoch
    optimizer: Callable = SGD
    precision: str = "64-true"
    bound: float = 1e-12
    trainer: tuple = ()
    is_nested: bool = False
    network: Callable[[], nn.Module] = lambda: nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5)
    )


def compiled():
    return torch.compile(Case().network(), backend="aot_eager")


CASES = {
    "Adam": Case(optimizer=functools.partial(torch.optim.Adam, lr=1e-2)),
    "last batch of 10": Case((30, 30, 10)),
    "last batch of 1": Case((30, 30, 1)),
    "accumulation": Case((30, 30, 30, 10), trainer=(("accumulate_grad_batches", 2),)),
    "clipping": Case(trainer=(("gradient_clip_val", 0.05),)),
    "torch.compile": Case(network=compiled),
    "nested inputs": Case((30, 30, 10), is_nested=True),
    "SGD, fp32": Case(precision="32-true", bound=1e-6),
    # bf16 keeps 8 bits: sums over parts of a batch round differently from those over the whole.
    "SGD, bf16-mixed": Case(precision="bf16-mixed", bound=5e-3),
}


class Module(pl.LightningModule):
    """Knows nothing of the strategy."""

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
        """Mean cross entropy of the batch, of two calls."""
        x, y = batch
        loss = F.cross_entropy(self.logits(x), y) + F.cross_entropy(self.logits(x / 2), y)
        self.losses.append(loss.item())
        return loss

    def logits(self, x):
        if not self.case.is_nested:
            return self(x)
        nest = {"parts": [x[:, :3], (x[:, 3:],)]}
        gain = torch.full((1, 1), 1.5, dtype=x.dtype)  # the same for every sample
        return self(nest, gain=gain, activation="tanh", scales=(2.0, "unused"))["logits"][0]

    def configure_optimizers(self):
        return self.case.optimizer(self.parameters())


class Batches(pl.LightningDataModule):
    """An epoch of batches of these sizes, of which the last may be smaller."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        x = torch.randn(sum(sizes), 8, generator=torch.Generator().manual_seed(0))
        self.size, self.samples = sizes[0], TensorDataset(x, x[:, :5].argmax(dim=1))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, batch_size=self.size)


def trainer(strategy, callbacks=(), **kwargs):
    """A quiet Trainer on two logical devices."""
    quiet = ("progress_bar", "model_summary", "checkpointing")
    kwargs = {"accelerator": "cpu", "devices": 2, "max_steps": 2, "logger": False} | kwargs
    kwargs |= {f"enable_{what}": False for what in quiet}
    callbacks = [GlobalBatches(seed=0), *callbacks]
    return pl.Trainer(
        strategy=strategy, callbacks=callbacks, use_distributed_sampler=False, **kwargs
    )


def train(case: Case, num_devices: int) -> list[float]:
    """The loss of every step; under dp where there are several devices."""
    torch.manual_seed(1)
    torch.compiler.reset()
    module, settings = Module(case), dict(case.trainer)
    trainer(
        DataParallelStrategy() if num_devices > 1 else "auto",
        devices=num_devices,
        max_epochs=-1,
        max_steps=NUM_STEPS // settings.get("accumulate_grad_batches", 1),
        precision=case.precision,
        **settings,
    ).fit(module, Batches(*case.batch_sizes))
    return module.losses


def difference(losses: list[float], reference: list[float]) -> float:
    """The largest difference over all steps."""
    assert len(losses) == len(reference) >= NUM_STEPS
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))
