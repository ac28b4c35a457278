"""Streams of real libraries, as their pages show them and as docs/streams.md does."""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_SAMPLES, BATCH_SIZE = 96, 8
PAGE = Path(__file__).parents[2] / "docs" / "streams.md"
RECIPES = {"Tars": "tars", "Chunks": "chunks", "Lines": "lines"}  # classes and files of the page


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


def recipe(name: str, num_workers: int = 0) -> Any:
    """Return the data module of a recipe in docs/streams.md, on the samples of ``write_splits``."""
    folder = Path(os.environ["LOADERS_FOLDER"])
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = importlib.import_module(RECIPES[name])
    more = {"block_size": 5} if name == "Chunks" else {}
    arguments = {"batch_size": BATCH_SIZE, "num_workers": num_workers} | more
    return getattr(module, name)(folder / RECIPES[name], **arguments)


def write_splits(name: str, folder: Path) -> None:
    """Write the samples of each split, in the format of a recipe, and the recipe's code."""
    (code,) = re.findall(
        rf"```python\n# src/project/data/{RECIPES[name]}.py\n(.*?)```", PAGE.read_text(), re.S
    )
    (folder / f"{RECIPES[name]}.py").write_text(code)
    samples = [*np.random.default_rng(0).standard_normal((NUM_SAMPLES, 5))]
    for split in ("train", "val", "test"):
        place = folder / RECIPES[name] / split
        place.mkdir(parents=True)
        if name == "Tars":
            write_tars(place)
        elif name == "Chunks":
            import litdata

            inputs, options = [x.tolist() for x in samples], {"chunk_size": 10, "num_workers": 1}
            litdata.optimize(fn=as_sample, inputs=inputs, output_dir=str(place), **options)
        else:
            lines = [json.dumps({"inputs": x.tolist(), "target": x.sum()}) + "\n" for x in samples]
            for i in range(8):
                (place / f"{i}.jsonl").write_text("".join(lines[12 * i : 12 * i + 12]))


def as_sample(numbers: list[float]) -> dict[str, Any]:
    """Return a sample by names."""
    inputs = torch.tensor(numbers, dtype=torch.float64)
    return {"inputs": inputs, "target": inputs.sum()}
