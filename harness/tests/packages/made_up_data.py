"""Small data sets in place of a user's: files, and data modules that packages do not have.

No module is wrapped here. Each package's own data sets and loaders are used where it has them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader


def write_files(folder: Path) -> None:
    """Write what packages read from ``data/`` of the working directory."""
    random = np.random.default_rng(0)
    mnist = folder / "MNIST" / "complete"
    mnist.mkdir(parents=True)
    for name, count in (("training.pt", 120), ("test.pt", 32)):
        labels = torch.tensor(random.integers(0, 10, count))
        images = torch.tensor(random.integers(0, 64, (count, 28, 28)), dtype=torch.uint8)
        images[torch.arange(count), labels * 2] += 128  # a bright row tells the class
        torch.save((images, labels), mnist / name)
    words = [f"word{n}" for n in random.integers(0, 40, 35 * 25)]
    lines = [" ".join(words[i : i + 9]) for i in range(0, len(words), 9)]
    (folder / "wikitext-2.txt").write_text("\n".join(lines) + "\n")
    for name, count in (("train", 24), ("val", 8), ("test", 8)):
        (folder / f"{name}.xyz").write_text("".join(_molecule(random) for _ in range(count)))


def _molecule(random: np.random.Generator) -> str:
    """Something like water in extended XYZ, with an energy and forces."""
    where = np.array([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]]) + random.normal(0, 0.05, (3, 3))
    forces = where.mean(0) - where
    rows = [
        " ".join([symbol, *map("{:.6f}".format, (*xyz, *force))])
        for symbol, xyz, force in zip("OHH", where, forces, strict=True)
    ]
    energy = f'energy={float((forces**2).sum()):.6f} pbc="F F F"'
    return "\n".join(["3", f"Properties=species:S:1:pos:R:3:forces:R:3 {energy}", *rows, ""])


def of_loaders(loader: Callable[[str], DataLoader[Any]], *more: str) -> LightningDataModule:
    """A data module without a class of its own, as Lightning makes it of data sets."""
    data = LightningDataModule()
    data.train_dataloader = lambda: loader("train")  # type: ignore[method-assign]
    for stage in ("val", *more):
        setattr(data, f"{stage}_dataloader", lambda: loader("val"))
    return data


def molecules() -> LightningDataModule:
    """Chains of carbon and oxygen, of which the property is how much of either there is."""
    from chemprop.data import MoleculeDatapoint, MoleculeDataset, build_dataloader

    counts = [(n, m) for n in range(1, 9) for m in range(1, 6)]  # 40
    points = [MoleculeDatapoint.from_smi("C" * n + "O" * m, [0.1 * n - 0.2 * m]) for n, m in counts]
    splits = {"train": MoleculeDataset(points[::2]), "val": MoleculeDataset(points[1::4])}
    return of_loaders(
        lambda split: build_dataloader(splits[split], 10, shuffle=split == "train"),
        *("test", "predict"),
    )


def time_series(covariates: bool = True) -> Any:
    """Four waves as pytorch-forecasting's data set.

    Args:
        covariates: NBeats takes none of them, not even those that are made of the target.
    """
    from pytorch_forecasting import TimeSeriesDataSet

    steps, series = np.tile(np.arange(30), 4), np.arange(4).repeat(30)
    value = (np.sin(steps / 3 + series) + 2 + 0.1 * series).astype("float32")
    return TimeSeriesDataSet(
        pd.DataFrame({"step": steps, "series": series.astype(str), "value": value}),
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


def waves(covariates: bool = True) -> LightningDataModule:
    """pytorch-forecasting's own loaders; that of training drops the last smaller batch."""
    data = time_series(covariates)
    return of_loaders(
        lambda split: data.to_dataloader(train=split == "train", batch_size=16),
        *("test", "predict"),
    )


def windows() -> LightningDataModule:
    """Pasts of 20 steps and futures of 4, by the names that gluonts' DeepAR asks for."""
    steps = torch.arange(24)
    past, future = steps[:20, None] / 24, steps[20:, None] / 24
    samples: Any = [
        {
            "feat_static_cat": torch.zeros(1, dtype=torch.long),
            "feat_static_real": torch.zeros(1),
            "past_time_feat": past,
            "past_target": wave[:20],
            "past_observed_values": torch.ones(20),
            "future_time_feat": future,
            "future_target": wave[20:],
            "future_observed_values": torch.ones(4),
        }
        for wave in (torch.sin(steps / 3 + index) + 2 for index in range(40))
    ]
    splits = {"train": samples, "val": samples[:20]}
    return of_loaders(lambda split: DataLoader(splits[split], 10, shuffle=split == "train"))


def sentences() -> LightningDataModule:
    """Sentences of 8 of 40 tokens by transformers' names; a third of the first is the label."""
    words = torch.randint(40, (48, 8), generator=torch.Generator().manual_seed(0))
    samples: Any = [
        {"input_ids": line, "attention_mask": torch.ones_like(line), "labels": line[0] % 3}
        for line in words
    ]
    splits = {"train": samples, "val": samples[:16]}
    return of_loaders(
        lambda split: DataLoader(splits[split], 8, shuffle=split == "train"), *("test", "predict")
    )


def atoms(**settings: Any) -> Any:
    """nequip's own data module, after the state that its own script sets before everything else."""
    from nequip.data.datamodule import ASEDataModule
    from nequip.utils.global_state import set_global_state

    set_global_state()
    return ASEDataModule(**settings)


def table() -> Any:
    """deeptab's own data module, with its preprocessing fitted to a made-up table."""
    from deeptab.core.preprocessing import build_preprocessor
    from deeptab.data import TabularDataModule

    random = np.random.default_rng(0)
    features = pd.DataFrame(random.normal(size=(80, 4)), columns=list("abcd"))
    data = TabularDataModule(build_preprocessor(), 16, shuffle=True, regression=True)
    data.preprocess_data(features, (features["a"] - features["b"]).to_numpy())
    data.assign_predict_dataset(features)
    return data


def table_features() -> tuple[dict[str, Any], ...]:
    """Return the description of the table for deeptab's networks."""
    data = table()
    return data.num_feature_info, data.cat_feature_info, data.embedding_feature_info
