import functools
import math

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.strategies.dp import DataParallelStrategy
from project.models import contrastive
from project.models.contrastive import Contrastive, info_nce

pytestmark = [
    # Lightning 2.6 walks batches with names that torch 2.13 calls old.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    # The loader of these tests is small on purpose, and has no validation set.
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]


def make_model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
    return Contrastive(net, functools.partial(torch.optim.SGD, lr=0.1), num_features=16)


def test_info_nce_of_equal_embeddings_is_that_of_guessing():
    """2B views: one right answer among 2B - 1."""
    embeddings = F.normalize(torch.ones(8, 4), dim=1)
    assert info_nce(embeddings, temperature=0.1).item() == pytest.approx(math.log(7))


def test_info_nce_is_small_where_only_the_two_views_are_close():
    views = torch.eye(4).repeat(2, 1)
    assert info_nce(views, temperature=0.1) < 1e-3
    unpaired = torch.cat([torch.eye(4), torch.eye(4).roll(1, dims=0)])
    assert info_nce(unpaired, temperature=0.1) > 5


def test_views_of_one_image_differ_and_without_change_are_the_image(monkeypatch):
    images = torch.rand(1, 1, 8, 8).expand(6, 1, 8, 8)
    assert len({tuple(view.flatten().tolist()) for view in contrastive.make_view(images)}) == 6
    for name in ("MAX_ANGLE", "MAX_SHIFT", "MAX_ZOOM"):
        monkeypatch.setattr(contrastive, name, 0)
    torch.testing.assert_close(contrastive.make_view(images), images)


def test_the_probe_does_not_teach_the_network():
    model, images = make_model(), torch.rand(4, 1, 8, 8)
    model.log = lambda *args, **kwargs: None
    gradients = []
    for labels in (torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long)):
        torch.manual_seed(0)
        model.zero_grad()
        model.training_step((images, labels), 0).backward()
        gradients.append([p.grad.clone() for p in (model.net[1].weight, model.probe.weight)])
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert not torch.equal(gradients[0][1], gradients[1][1])


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
        precision="64-true",  # in 32 bits a step's rounding differs from processor to processor
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
    assert parallel.losses == pytest.approx(alone.losses, abs=1e-9)
