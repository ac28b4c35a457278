from pathlib import Path

import torch
from omegaconf import OmegaConf

from harness.run import tasks as run
from project.models.mlp import MLP


def test_mlp_maps_a_batch_to_logits() -> None:
    net = MLP(in_features=12, hidden=[8], num_outputs=5, dropout=0.1)
    assert net(torch.randn(2, 3, 2, 2)).shape == (2, 5)


def test_every_parameter_of_mlp_gets_a_gradient() -> None:
    net = MLP(in_features=12, hidden=[8], num_outputs=5)
    net(torch.randn(4, 12)).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_mlp_learns(make_cfg, tmp_path: Path) -> None:
    """The config's network, for two epochs of a task that a guess gets right once in ten times."""
    overrides = ["strategy=cpu", "trainer.max_epochs=2"]
    cfg = make_cfg("data=synthetic", "model=mlp", *overrides)
    cfg.trainer.enable_progress_bar = False
    results = run.train(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)))
    assert results["test/accuracy"] > 0.5
