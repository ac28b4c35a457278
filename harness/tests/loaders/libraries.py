"""Streams of real libraries, as their pages show them."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_SAMPLES, BATCH_SIZE = 96, 8


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
    return [{"inputs": x, "target": x.sum()} for x in inputs]


def write(kind: str, place: Path) -> None:
    """Write what a loader reads."""
    os.environ["LOADERS_FOLDER"] = str(place)
    if kind.startswith("webdataset"):
        write_tars()


def folder(name: str) -> Path:
    """Where the data are; every process of a run finds the same."""
    path = Path(os.environ["LOADERS_FOLDER"], name)
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_tars(num_per_tar: int = 12) -> None:
    """Write the samples for webdataset."""
    for start in range(0, NUM_SAMPLES, num_per_tar):
        with tarfile.open(folder("tars") / f"{start // num_per_tar:03d}.tar", "w") as tar:
            for i, sample in enumerate(samples()[start : start + num_per_tar]):
                for key, value in sample.items():
                    data = io.BytesIO()
                    np.save(data, value.numpy())
                    info = tarfile.TarInfo(f"{start + i:05d}.{key}.npy")
                    info.size = data.tell()
                    data.seek(0)
                    tar.addfile(info, data)


def named(batch: Any) -> dict[str, Any]:
    """A batch by names, as tensors."""
    return dict(zip(("inputs", "target"), map(torch.as_tensor, batch), strict=True))


def splits_itself(part: int, num_parts: int) -> None:
    """Tell the harness so, which asks for this function where several processes read."""


def webdataset_loader(num_workers: int, splits: bool) -> Any:
    import webdataset as wds

    splitter = {"nodesplitter": wds.split_by_node} if splits else {}
    urls = sorted(str(path) for path in folder("tars").glob("*.tar"))
    data = wds.WebDataset(urls, shardshuffle=False, **splitter).decode()
    data = data.to_tuple("inputs.npy", "target.npy").batched(BATCH_SIZE).map(named)
    loader = wds.WebLoader(data, batch_size=None, num_workers=num_workers)
    loader.read_part = splits_itself
    return loader
