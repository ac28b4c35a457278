"""Measure training on a GPU with the library, with a loop written by hand, and with Lightning.

    python benchmarks/gpu.py [--tasks mlp cnn wide text]

All contenders train the same LightningModule on the same batches, which are in host memory.
Measured are steps per second after the first steps, the device's peak memory in MiB, and the
synchronisations per step. torch.cuda.set_sync_debug_mode counts these, and finds most of them. The
library runs as `train.py` does, with its default callbacks, loggers and parity check, and logs a
row at every tenth step. Without a GPU, networks and batches are small.
"""

import contextlib
import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import contest
import images
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from harness import BatchedDataset, DataModule
from harness.command.compose import compose
from harness.training.build import build

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
START, NUM_WATCHED = 10, 20  # steps before the clock starts; steps whose waits are counted
VOCABULARY, LENGTH = 256, 512 if IS_GPU else 32


class Layer(nn.TransformerEncoderLayer):
    """A layer of a language model, in which tokens attend only to earlier tokens."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        output: Tensor = super().forward(x, mask, is_causal=True)
        return output


def text() -> nn.Module:
    """Build a language model: 12 layers of width 1024 on a GPU."""
    width, depth = (1024, 12) if IS_GPU else (32, 1)
    layers = [Layer(width, width // 16, 4 * width, 0.0, batch_first=True) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.Linear(width, VOCABULARY))


def wide() -> nn.Module:
    """Build eight matrices of 8192 x 8192, a step of which takes 30 ms on an H100."""
    width = 8192 if IS_GPU else 64
    layers = [part for _ in range(8) for part in (nn.Linear(width, width), nn.ReLU())]
    first, last = nn.Linear(784, width), nn.Linear(width, images.NUM_CLASSES)
    return nn.Sequential(nn.Flatten(), first, *layers, last)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": images.mlp,
    "cnn": images.cnn,
    "wide": wide,
    "text": text,
}
NUM_STEPS = (
    {"mlp": 1000, "cnn": 500, "wide": 100, "text": 30} if IS_GPU else dict.fromkeys(NETWORKS, 30)
)
PRECISION = {"text": "bf16-mixed"}


class Samples(BatchedDataset):
    """Whole batches from memory, in epochs that are longer than a measurement."""

    def __init__(self, task: str, batch_size: int) -> None:
        self.num, num = batch_size * 5000, batch_size * 4
        if task == "text":
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(VOCABULARY, (num, LENGTH + 1), generator=generator)
            self.inputs, self.labels = tokens[:, :-1], tokens[:, 1:]
        else:
            pixels, self.labels = images.make_images(num)
            self.inputs = pixels.float() / 255

    def __len__(self) -> int:
        return self.num

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices).remainder_(len(self.labels))
        return self.inputs.index_select(0, rows), self.labels.index_select(0, rows)


class Single(Dataset[Any]):
    """The same samples one by one, as in a tutorial of Lightning."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = index % len(self.samples.labels)
        return self.samples.inputs[row], self.samples.labels[row]


class Data(DataModule):
    """The samples as a data module of the library."""

    def __init__(self, task: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.task = task

    def make_dataset(self, split: str) -> Samples:
        return Samples(self.task, self.batch_size)


class Module(pl.LightningModule):
    """The module that all contenders train."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.net = NETWORKS[task]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, labels = self.net(batch[0]), batch[1]
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Gauge(pl.Callback):
    """Measure steps per second, then waits per step, then the peak memory."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.step, self.num_waits = num_steps, 0, 0
        self.stack = contextlib.ExitStack()
        self.figures: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.step += 1
        if self.step == START:
            self.started = now()
        elif self.step == START + self.num_steps:
            self.speed = self.num_steps / (now() - self.started)
            self.stack.enter_context(counted(self))
        elif self.step == START + self.num_steps + NUM_WATCHED:
            self.stack.close()
            peak = torch.cuda.max_memory_allocated() / 2**20 if IS_GPU else 0
            self.figures = self.speed, peak, self.num_waits / NUM_WATCHED

    @property
    def last_step(self) -> int:
        return START + self.num_steps + NUM_WATCHED


def now() -> float:
    if IS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def counted(gauge: Gauge) -> Iterator[None]:
    def show(message: Any, *_: Any, **__: Any) -> None:
        gauge.num_waits += "synchroniz" in str(message)

    with warnings.catch_warnings():
        if IS_GPU:
            torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield
    if IS_GPU:
        torch.cuda.set_sync_debug_mode("default")


def by_hand(task: str, batch_size: int, gauge: Gauge) -> None:
    torch.manual_seed(1)
    module, samples = Module(task).to(DEVICE), Samples(task, batch_size)
    module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    optimizer: Any = module.configure_optimizers()
    autocast = torch.autocast(DEVICE.type, torch.bfloat16, enabled=task in PRECISION)
    order = torch.randperm(len(samples)).tolist()
    for step in range(gauge.last_step):
        batch = samples.__getitems__(order[step * batch_size : (step + 1) * batch_size])
        if IS_GPU:
            batch = tuple(part.pin_memory().to(DEVICE, non_blocking=True) for part in batch)  # type: ignore[assignment]
        with autocast:
            loss = module.training_step(batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gauge.on_train_batch_end()


def through_harness(task: str, batch_size: int, gauge: Gauge) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"run_dir={folder}",
            "test=false",
            f"trainer.precision={PRECISION.get(task, '32-true')}",
        ]
        steps = [
            f"trainer.max_steps={gauge.last_step}",
            "trainer.max_epochs=-1",
            "trainer.limit_val_batches=0",
        ]
        cfg = compose("train", [*words, *steps, "objective=null"], contest.ROOT / "conf")
        OmegaConf.set_struct(cfg, False)
        cfg.data = {"_target_": "gpu.Data", "task": task, "batch_size": batch_size}
        cfg.data.seed = cfg.seed
        cfg.model = {"_target_": "gpu.Module", "task": task}
        trainer, model, datamodule = build(cfg)
        trainer.callbacks += [gauge]  # type: ignore[attr-defined]  # set untyped
        trainer.fit(model, datamodule)


def plain_lightning(task: str, batch_size: int, gauge: Gauge) -> None:
    pl.seed_everything(1, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=gauge.last_step,
            precision=PRECISION.get(task, "32-true"),  # type: ignore[arg-type]
            default_root_dir=folder,
            log_every_n_steps=10,
            callbacks=[gauge],
            devices=1,
        )
        samples = Single(Samples(task, batch_size))
        loader = DataLoader(samples, batch_size, shuffle=True, pin_memory=IS_GPU)
        trainer.fit(Module(task), loader)


def measured(contender: Any, task: str, batch_size: int, num_steps: int) -> tuple[float, ...]:
    """Measure without output and after the memory of other contenders was freed."""
    gc.collect()
    if IS_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    gauge = Gauge(num_steps)
    with open(os.devnull, "w") as nowhere, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            contender(task, batch_size, gauge)
    return gauge.figures


def batch_size_of(task: str) -> int:
    """Return the batch size; for the text model, the size that fills four fifths of the memory."""
    if task != "text":
        return {"wide": 512}.get(task, 128)
    if not IS_GPU:
        return 8
    small, large = (measured(by_hand, task, size, 1)[1] for size in (8, 16))
    available = 0.8 * torch.cuda.get_device_properties(0).total_memory / 2**20
    return 8 + max(0, int((available - small) / max((large - small) / 8, 1)))


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=1)
    parser.add_argument("--tasks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    options = parser.parse_args()
    device = torch.cuda.get_device_name(0) if IS_GPU else "no GPU"
    print(f"{device}, torch {torch.__version__}, Lightning {pl.__version__}", flush=True)
    print("\n| | steps/s | of by hand | peak MiB | waits/step |\n|---|---|---|---|---|", flush=True)
    contenders = {
        "by hand": by_hand,
        "the library": through_harness,
        "plain Lightning": plain_lightning,
    }
    for task in options.tasks:
        size = batch_size_of(task)
        for _ in range(options.repeats):
            base = None
            for name, contender in contenders.items():
                figures = measured(contender, task, size, NUM_STEPS[task])
                speed, peak, waits = figures
                base = base or speed
                row = f"{speed:.1f} | {speed / base:.2f} | {peak:,.0f} | {waits:.2f}"
                print(f"| {task}, {size} samples: {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
