"""Train the same batches under dp and on one device, for 50 steps: the loss of each."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.exact.global_batches import GlobalBatches
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
        """Mean cross entropy of the batch."""
        x, y = batch
        loss = sum(F.cross_entropy(self.logits(x / (1 + i)), y) for i in range(self.case.num_calls))
        self.losses.append(loss.item())
        return loss

    def logits(self, x):
        if self.case.inputs == "plain":
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


def train(case: Case, num_devices: int) -> list[float]:
    """The loss of every step; under dp where there are several devices."""
    torch.manual_seed(1)
    torch.compiler.reset()
    module = Module(case)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=DataParallelStrategy() if num_devices > 1 else "auto",
        devices=num_devices,
        max_epochs=-1,
        max_steps=NUM_STEPS // dict(case.trainer).get("accumulate_grad_batches", 1),
        precision=case.precision,
        callbacks=[GlobalBatches(seed=0)],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **dict(case.trainer),
    )
    trainer.fit(module, Batches(*case.batch_sizes))
    return module.losses


def difference(losses: list[float], reference: list[float]) -> float:
    """The largest difference over all steps."""
    assert len(losses) == len(reference) >= NUM_STEPS
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))
