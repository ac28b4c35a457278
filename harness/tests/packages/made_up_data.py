"""Small data sets that stand for an owner's: files, and the data modules that packages leave to us.

No module is wrapped here. Each package's own data sets and loaders are used where it has them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

NUM_IMAGES = 96


def write_files(folder: Path) -> None:
    """Write what packages read from ``data/`` of the working directory."""
    random = np.random.default_rng(0)
    mnist = folder / "data" / "MNIST" / "complete"
    mnist.mkdir(parents=True)
    for name, count in (("training.pt", NUM_IMAGES + 24), ("test.pt", 32)):
        labels = torch.tensor(random.integers(0, 10, count))
        images = torch.tensor(random.integers(0, 64, (count, 28, 28)), dtype=torch.uint8)
        images[torch.arange(count), labels * 2] += 128  # a bright row tells the class
        torch.save((images, labels), mnist / name)
    words = [f"word{n}" for n in random.integers(0, 40, 35 * 25)]
    lines = [" ".join(words[i : i + 9]) for i in range(0, len(words), 9)]
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(lines) + "\n")
    for name, count in (("train", 24), ("val", 8), ("test", 8)):
        (folder / "data" / f"{name}.xyz").write_text("".join(_molecules(random, count)))


def _molecules(random: np.random.Generator, count: int) -> list[str]:
    """Water-like clusters in extended XYZ, with an energy and forces."""
    frames = []
    for _ in range(count):
        where = np.array([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        where = where + random.normal(0, 0.05, where.shape)
        forces = -(where - where.mean(0))
        energy = float((forces**2).sum())
        rows = [
            " ".join([symbol, *(f"{x:.6f}" for x in (*xyz, *force))])
            for symbol, xyz, force in zip("OHH", where, forces, strict=True)
        ]
        header = f'Properties=species:S:1:pos:R:3:forces:R:3 energy={energy:.6f} pbc="F F F"'
        frames.append("\n".join(["3", header, *rows]) + "\n")
    return frames


class Molecules(LightningDataModule):
    """SMILES with a made-up property, in chemprop's own data set and loader."""

    def __init__(self, batch_size: int = 10) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Chains of carbon and oxygen: the property is how much of either there is."""
        from chemprop.data import MoleculeDatapoint, MoleculeDataset

        smiles = ["C" * n + "O" * m for n in range(1, 9) for m in range(1, 6)]  # 40
        points = [
            MoleculeDatapoint.from_smi(s, [0.1 * s.count("C") - 0.2 * s.count("O")]) for s in smiles
        ]
        self.splits = {
            "train": MoleculeDataset(points[::2]),
            "val": MoleculeDataset(points[1::4]),
            "test": MoleculeDataset(points[3::4]),
        }

    def _loader(self, split: str) -> DataLoader[Any]:
        from chemprop.data import build_dataloader

        return build_dataloader(self.splits[split], self.batch_size, shuffle=split == "train")

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        """In order."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """In order."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test's molecules."""
        return self._loader("test")


def time_series(covariates: bool = True) -> Any:
    """Four waves as pytorch-forecasting's data set.

    Args:
        covariates: NBeats takes none of them, not even those that are made of the target.
    """
    from pytorch_forecasting import TimeSeriesDataSet

    steps = np.arange(30)
    frames = [
        pd.DataFrame(
            {
                "step": steps,
                "series": str(k),
                "value": (np.sin(steps / 3 + k) + 2 + 0.1 * k).astype("float32"),
            }
        )
        for k in range(4)
    ]
    return TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True),
        time_idx="step",
        target="value",
        group_ids=["series"],
        static_categoricals=["series"] if covariates else [],
        time_varying_known_reals=["step"] if covariates else [],
        time_varying_unknown_reals=["value"],
        min_encoder_length=12,
        max_encoder_length=12,
        min_prediction_length=4,
        max_prediction_length=4,
        add_relative_time_idx=covariates,
        add_target_scales=covariates,
    )


class TimeSeries(LightningDataModule):
    """pytorch-forecasting's own loaders of a ``TimeSeriesDataSet``."""

    def __init__(self, dataset: Any, batch_size: int = 16) -> None:
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled, without the last smaller batch."""
        return self.dataset.to_dataloader(train=True, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        """In order."""
        return self.dataset.to_dataloader(train=False, batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Windows(Dataset[dict[str, Tensor]]):
    """Pasts and futures of waves, by the names that gluonts' DeepAR asks for."""

    def __init__(self, count: int, past: int = 20, future: int = 4) -> None:
        self.count, self.past, self.future = count, past, future

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        steps = torch.arange(self.past + self.future)
        wave = torch.sin(steps / 3 + index) + 2
        return {
            "feat_static_cat": torch.zeros(1, dtype=torch.long),
            "feat_static_real": torch.zeros(1),
            "past_time_feat": steps[: self.past, None] / 24,
            "past_target": wave[: self.past],
            "past_observed_values": torch.ones(self.past),
            "future_time_feat": steps[self.past :, None] / 24,
            "future_target": wave[self.past :],
            "future_observed_values": torch.ones(self.future),
        }


def windows(batch_size: int = 10) -> LightningDataModule:
    """A data module without a class of its own, as Lightning makes it of data sets."""
    return LightningDataModule.from_datasets(
        train_dataset=Windows(40), val_dataset=Windows(20), batch_size=batch_size
    )


def atoms(**settings: Any) -> Any:
    """nequip's own data module, after the state that its own script sets before everything else."""
    from nequip.data.datamodule import ASEDataModule
    from nequip.utils.global_state import set_global_state

    set_global_state()
    return ASEDataModule(**settings)


def table(batch_size: int = 16) -> Any:
    """deeptab's own data module, with its preprocessing fitted to a made-up table."""
    from deeptab.core.preprocessing import build_preprocessor
    from deeptab.data import TabularDataModule

    random = np.random.default_rng(0)
    features = pd.DataFrame(random.normal(size=(80, 4)), columns=list("abcd"))
    data = TabularDataModule(build_preprocessor(), batch_size, shuffle=True, regression=True)
    data.preprocess_data(features, (features["a"] - features["b"]).to_numpy())
    data.assign_predict_dataset(features)
    return data


def table_features() -> tuple[dict[str, Any], ...]:
    """What deeptab's networks must know of the table."""
    data = table()
    return data.num_feature_info, data.cat_feature_info, data.embedding_feature_info
