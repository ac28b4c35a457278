"""A stream of a real library, as its pages show it."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_SAMPLES, BATCH_SIZE = 96, 8


def write_tars(folder: Path) -> None:
    """Write the samples that ``webdataset_loader`` finds by the variable LOADERS_FOLDER."""
    import webdataset as wds

    inputs = np.random.default_rng(0).standard_normal((NUM_SAMPLES, 5))
    with wds.ShardWriter(f"{folder}/%03d.tar", maxcount=12, verbose=0) as tars:
        for i, x in enumerate(inputs):
            tars.write({"__key__": f"{i:05d}", "inputs.npy": x, "target.npy": x.sum()})


def webdataset_loader(num_workers: int, splits: bool) -> Any:
    import webdataset as wds

    splitter = {"nodesplitter": wds.split_by_node} if splits else {}
    urls = sorted(map(str, Path(os.environ["LOADERS_FOLDER"]).glob("*.tar")))
    data = wds.WebDataset(urls, shardshuffle=False, **splitter).decode()
    data = data.to_tuple("inputs.npy", "target.npy").batched(BATCH_SIZE).map(named)
    loader = wds.WebLoader(data, batch_size=None, num_workers=num_workers)
    loader.read_part = splits_itself
    return loader


def named(batch: Any) -> dict[str, Any]:
    """A batch by names, as tensors."""
    return dict(zip(("inputs", "target"), map(torch.as_tensor, batch), strict=True))


def splits_itself(part: int, num_parts: int) -> None:
    """Declare it to the library, which asks for this function if several ranks read."""
