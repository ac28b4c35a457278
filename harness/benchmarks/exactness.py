"""What it costs per step that a batch means the same under every strategy.

    python benchmarks/exactness.py [--repeats 9] [--json exactness.json]

Each part is timed beside what one would write without it, interleaved, over whole epochs of
60,000 samples in batches of 128 (469 steps). The last column is the part's share of a 10 ms step.
"""

import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import contest
import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

from harness import mean_over
from harness.data.batches import Batch
from harness.data.randomness import preserved_generators, uniform
from harness.data.shared_batches import SharedBatchSampler
from harness.exact.global_batches import GlobalBatches

NUM_SAMPLES, BATCH_SIZE, STEP_SECONDS = 60_000, 128, 0.010
NUM_STEPS = -(-NUM_SAMPLES // BATCH_SIZE)
INDICES = Batch(list(range(BATCH_SIZE)), epoch=1)
SAMPLES = TensorDataset(torch.randn(BATCH_SIZE, 1, 28, 28), torch.zeros(BATCH_SIZE))
SEEDED = Batch(list(INDICES), epoch=1, seed=1)
RANGE = range(NUM_SAMPLES)
BATCHES = BatchSampler(RandomSampler(RANGE), BATCH_SIZE, drop_last=False)
GLOBAL = SharedBatchSampler(BATCHES, "epoch", num_ranks=2, rank=1)
LEAF = torch.ones((), requires_grad=True)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "The `srun` command")
TRAINER = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
MODULE = pl.LightningModule()


def backward(weigh: bool, declare: bool = False) -> None:
    callback = GlobalBatches(0)
    callback.on_train_start(TRAINER, MODULE)
    callback.sharing = [GLOBAL]
    for batch_idx in range(NUM_STEPS):
        loss = LEAF * 2
        if declare:
            loss = mean_over(loss, 100)
        if weigh:
            callback.on_train_batch_start(TRAINER, MODULE, None, batch_idx)
            callback.weight = 1.01  # the worst case: every batch is uneven
            callback.on_before_backward(TRAINER, MODULE, loss)
        loss.backward()


def read(seeded: bool) -> None:
    for _ in range(NUM_STEPS // 20):
        with preserved_generators() if seeded else nullcontext():
            indices = SEEDED if seeded else INDICES
            torch.utils.data.default_collate([SAMPLES[index] for index in indices])


def augment(by_sample: bool) -> None:
    for _ in range(NUM_STEPS):
        if by_sample:
            torch.from_numpy(uniform(1, 2, INDICES, 2))
        else:
            torch.rand(BATCH_SIZE, 2)


# name: (with, without, steps timed)
PARTS: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {
    "order and shares of an epoch": (
        lambda: list(GLOBAL),
        lambda: list(BATCHES),
        NUM_STEPS,
    ),
    "weight of an uneven batch": (lambda: backward(True), lambda: backward(False), NUM_STEPS),
    "what a loss is a mean over": (
        lambda: backward(False, declare=True),
        lambda: backward(False),
        NUM_STEPS,
    ),
    "random numbers by sample": (lambda: augment(True), lambda: augment(False), NUM_STEPS),
    "seeding ordinary data sets": (lambda: read(True), lambda: read(False), NUM_STEPS // 20),
}


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    options = contest.arguments(__doc__ or "", repeats=9).parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)

    def extra(with_it: Callable[[], object], without: Callable[[], object], steps: int) -> float:
        return (seconds(with_it) - seconds(without)) / steps * 1e6

    turns = {name: partial(extra, *part) for name, part in PARTS.items()}
    figures = contest.take_turns(turns, options.repeats)
    print(contest.machine())
    print(f"{'':30} {'extra us per step (min - max)':34} share of a 10 ms step")
    for name, values in figures.items():
        share = statistics.median(values) * 1e-6 / STEP_SECONDS
        print(f"{name:30} {contest.spread(values, 1):34} {share:.2%}")
    contest.write(options.json, figures)


if __name__ == "__main__":
    main()
