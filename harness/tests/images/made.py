"""Small images for tests, and the words of a short run on them."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from harness.images.datamodule import Images

CLASSES = ("bird", "cat", "dog")


def picture(seed: int, width: int, height: int, label: int = 0) -> Image.Image:
    """A smooth picture whose colours tell its class."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 100, (3, 4, 3))
    coarse[..., label] += 140
    return Image.fromarray(coarse.astype(np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )


def write_images(
    root: Path, num: int = 12, classes: tuple[str, ...] = CLASSES, suffix: str = ".jpg"
) -> Path:
    """Write ``num`` images of mixed sizes for each class."""
    for label, name in enumerate(classes):
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(num):
            seed = 1000 * label + i
            image = picture(seed, 20 + seed % 7, 18 + seed % 5, label % 3)
            image.save(folder / f"{i:03d}{suffix}")
    return root


def data(root: Path, **settings: Any) -> Images:
    """The data module, with settings of a short test."""
    defaults: dict[str, Any] = {"size": 16, "batch_size": 7, "val_fraction": 0.2, "num_workers": 0}
    defaults["cache_dir"] = str(root.parent / "cache")
    return Images(str(root), **defaults | settings)


def words(root: Path, *more: str) -> list[str]:
    """A run of seconds."""
    return [
        "experiment=images",
        f"data.root={root}",
        f"data.cache_dir={root.parent / 'cache'}",
        "data.size=16",
        "data.batch_size=7",
        "data.val_fraction=0.2",
        "model.net.layers=[1,1,1,1]",
        "model.net.width=4",
        "model.net.stem=small",
        "strategy=cpu",
        "trainer.max_epochs=2",
        "trainer.enable_progress_bar=false",
        *more,
    ]
