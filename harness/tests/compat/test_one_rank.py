"""Code that divides by the world size, as for a sampler of Lightning's, changes no run."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from harness import num_devices, num_ranks
from harness.compat.hooks import around_hooks
from harness.compat.one_rank import HOOKS, seen_as_one_rank
from harness.errors import UserError
from tests.strategy_runs import in_processes, run_of, write_conf
from tests.workers.trainer import small_trainer

pytestmark = pytest.mark.filterwarnings("ignore")


class Divided(pl.LightningDataModule):
    """Divides its batch size in ``setup``, as that of lightning-hydra-template."""

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        assert 12 % self.trainer.world_size == 0
        self.batch_size = 12 // self.trainer.world_size
        inputs = torch.randn(31, 4, generator=torch.Generator().manual_seed(0)).double()
        self.samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, self.batch_size, shuffle=True)


class Distributed(Divided):
    """Has a sampler that asks for the rank, or for both numbers."""

    def train_dataloader(self) -> DataLoader[Any]:
        trainer: Any = self.trainer
        numbers = () if dist.is_initialized() else (trainer.world_size, trainer.global_rank)
        sampler = DistributedSampler(self.samples, *numbers)
        return DataLoader(self.samples, self.batch_size, sampler=sampler)


class NamedRanks(Distributed):
    """Has the number of ranks from the command."""

    def train_dataloader(self) -> DataLoader[Any]:
        trainer: Any = self.trainer
        sampler = DistributedSampler(self.samples, num_ranks(trainer), trainer.global_rank, True)
        return DataLoader(self.samples, self.batch_size, sampler=sampler)


class Strided(Divided):
    """Gives each rank other samples."""

    def train_dataloader(self) -> DataLoader[Any]:
        trainer: Any = self.trainer
        own = range(trainer.global_rank, len(self.samples), trainer.world_size)
        return DataLoader(Subset(self.samples, own), 2)


class Scaled(pl.LightningModule):
    """Scales its learning rate, and plans the steps of its schedule, by the number of devices."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        trainer: Any = self.trainer
        number = trainer.num_devices * trainer.num_nodes
        assert trainer.estimated_stepping_batches > 0  # which asks for the loaders
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01 * trainer.world_size)
        steps = len(trainer.datamodule.samples) // (12 * number)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, steps, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(data: type[Divided], path: Path, devices: int, strategy: str | None = None) -> None:
    pl.seed_everything(1)
    module = Scaled()
    given: Any = {} if strategy is None else {"strategy": strategy}
    trainer = small_trainer(devices, max_epochs=2, precision="64-true", **given)
    made = data()
    around_hooks(trainer, [module, made], HOOKS, seen_as_one_rank)
    trainer.fit(module, made)
    assert trainer.world_size == devices
    if trainer.is_global_zero:
        torch.save(module.state_dict(), path)


@pytest.mark.parametrize("data", [Divided, Distributed, NamedRanks])
def test_what_divides_by_the_world_size_is_the_run_of_one_rank(
    data: type[Divided], tmp_path: Path
) -> None:
    paths = [tmp_path / f"{devices}.pt" for devices in (1, 2)]
    for devices, path in enumerate(paths, 1):
        in_processes(devices, train, data, path, devices)
    one, two = map(torch.load, paths)
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_a_command_is_the_same_under_any_strategy(tmp_path: Path) -> None:
    classes = {"data": "Divided", "model": "Scaled"}
    words = write_conf(tmp_path, **{g: f"_target_: {__name__}.{n}\n" for g, n in classes.items()})
    words += ["name=run"]
    for name in ("one", "dp", "ddp"):
        (tmp_path / name).mkdir()
    found = [
        torch.load(run_of(words, strategy, tmp_path / name) / "checkpoints" / "last.ckpt")
        for name, strategy in {"one": "cpu", "dp": "dp(2)", "ddp": "ddp(2)"}.items()
    ]
    one, *several = [checkpoint["state_dict"] for checkpoint in found]
    for weights in several:
        torch.testing.assert_close(weights, one, rtol=1e-12, atol=1e-12)


def refused(path: Path) -> None:
    with pytest.raises(UserError, match="Remove the split by rank"):
        train(Strided, path, 2)


def test_samples_of_a_rank_s_own_are_refused(tmp_path: Path) -> None:
    in_processes(2, refused, tmp_path / "none.pt")


class Asks(Scaled):
    """Reads all numbers, and calls a collective, in a hook that sees one rank."""

    def configure_optimizers(self) -> Any:
        trainer: Any = self.trainer
        seen = (trainer.world_size, trainer.num_devices, trainer.num_nodes)
        assert (*seen, trainer.strategy.world_size, dist.get_world_size()) == (1,) * 5
        assert (num_ranks(trainer), num_devices(trainer)) == (2, 2)
        assert trainer.global_rank == dist.get_rank()
        assert isinstance(trainer, pl.Trainer)
        dist.barrier()
        rank = torch.tensor(float(trainer.global_rank))
        assert self.all_gather(rank).tolist() == [0, 1]
        assert float(trainer.strategy.reduce(rank, reduce_op="mean")) == 0.5
        return super().configure_optimizers()


def ask() -> None:
    module, data = Asks(), Divided()
    trainer = small_trainer(2, max_epochs=1, precision="64-true")
    kinds = type(trainer), type(trainer.strategy)
    around_hooks(trainer, [module, data], HOOKS, seen_as_one_rank)
    trainer.fit(module, data)
    assert (type(trainer), type(trainer.strategy)) == kinds
    assert (trainer.world_size, trainer.num_devices, num_ranks(trainer)) == (2, 2, 2)
    assert DistributedSampler(range(4), 2, 1).rank == 1


def test_a_hook_sees_one_rank_and_collectives_are_those_of_the_run() -> None:
    in_processes(2, ask)
