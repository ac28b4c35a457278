import functools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness import train
from project.models import contrastive
from project.models.contrastive import Contrastive, info_nce


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


def test_under_dp_every_image_meets_the_whole_batch(tmp_path: Path):
    """Same negatives, same loss as on one device; under ddp each rank has fewer negatives."""
    words = ("experiment=contrastive", "trainer.max_epochs=1", "trainer.limit_train_batches=3")
    words += ("trainer.precision=64-true", "trainer.log_every_n_steps=1", "logger.tensorboard=null")
    words += ("trainer.limit_val_batches=1", "test=false", "trainer.enable_progress_bar=false")
    words += ("trainer.accelerator=cpu", f"output_dir={tmp_path}")
    found = []
    for strategy in (("strategy=cpu",), ("strategy=dp", "trainer.devices=2")):
        table = train(*words, *strategy).table.drop_nulls("train/loss")
        assert table["train/num_negatives"].to_list() == [2 * 256 - 2] * 3
        found.append(table["train/loss"].to_list())
    assert found[0] == pytest.approx(found[1], abs=1e-9)
