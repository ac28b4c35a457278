import functools
import math

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from project.models.contrastive import Contrastive, NearestNeighborAccuracy, info_nce
from project.strategies.dp import DataParallelStrategy

pytestmark = [
    # Lightning 2.6 walks batches with names that torch 2.13 calls old.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    # The loader of these tests is small on purpose.
    # It has no validation set.
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    # On a machine with Slurm installed.
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


def make_model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
    return Contrastive(net, functools.partial(torch.optim.SGD, lr=0.1))


def test_info_nce_of_equal_embeddings_is_that_of_guessing():
    """2B views: one right answer among 2B - 1."""
    embeddings = F.normalize(torch.ones(8, 4), dim=1)
    assert info_nce(embeddings, temperature=0.1).item() == pytest.approx(math.log(7))


def test_info_nce_is_small_where_only_the_two_views_are_close():
    views = torch.eye(4).repeat(2, 1)
    assert info_nce(views, temperature=0.1) < 1e-3
    unpaired = torch.cat([torch.eye(4), torch.eye(4).roll(1, dims=0)])
    assert info_nce(unpaired, temperature=0.1) > 5


def test_a_view_without_change_is_the_image():
    model = make_model()
    model.max_angle = model.max_shift = model.max_zoom = 0
    images = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(model.view(images), images)


def test_views_of_one_image_differ():
    images = torch.rand(1, 1, 8, 8).expand(6, 1, 8, 8)
    views = make_model().view(images)
    assert len({tuple(view.flatten().tolist()) for view in views}) == 6


@pytest.mark.parametrize(
    ("embeddings", "labels", "share"),
    [
        ([[1, 0], [1, 0.1], [0, 1], [0.1, 1]], [0, 0, 1, 1], 1.0),
        ([[1, 0], [1, 0.1], [0, 1], [0.1, 1]], [0, 1, 0, 1], 0.0),
        ([[1, 0], [1, 0.1], [1, 0.2], [0, 1]], [0, 0, 0, 1], 0.75),
    ],
)
def test_nearest_neighbors_vote_without_the_sample_itself(embeddings, labels, share):
    metric = NearestNeighborAccuracy(num_neighbors=1)
    rows = F.normalize(torch.tensor(embeddings, dtype=torch.float32), dim=1)
    metric.update(rows[:3], torch.tensor(labels[:3]))  # in two batches
    metric.update(rows[3:], torch.tensor(labels[3:]))
    assert metric.compute() == share


def test_a_tie_goes_to_the_nearest_neighbor():
    metric = NearestNeighborAccuracy(num_neighbors=2)
    angles = torch.tensor([0.0, 0.1, 0.3])
    rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    metric.update(rows, torch.tensor([7, 7, 3]))
    assert metric.compute().item() == pytest.approx(2 / 3)


class Steps(pl.Callback):
    def __init__(self):
        self.losses, self.num_negatives = [], []

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.losses.append(outputs["loss"].item())
        self.num_negatives.append(trainer.callback_metrics["train/num_negatives"].item())


def train(strategy, devices):
    steps = Steps()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=4,
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = make_model()
    data = TensorDataset(torch.rand(60, 1, 8, 8), torch.zeros(60, dtype=torch.long))
    trainer.fit(model, DataLoader(data, batch_size=24, drop_last=True))
    return steps


def test_under_dp_every_image_meets_the_whole_batch():
    """Same negatives, same loss as on one device; ddp has a share of them on each process."""
    alone, parallel = train("auto", 1), train(DataParallelStrategy(), 2)
    assert alone.num_negatives == parallel.num_negatives == [2 * 24 - 2] * 8
    assert parallel.losses == pytest.approx(alone.losses, abs=1e-6)
