"""Data that cost a data worker its life, once."""

import os
import signal
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from harness import DataModule
from tests.modules.data import BATCH_SIZE, NUM_TRAIN, NUM_VAL, Flowers


class Dying(Flowers):
    """The training sample 20 is deadly, until the file ``flag`` is there."""

    flag: Path | None = None

    def __getitem__(self, index: int) -> Any:
        if index == 20 and self.flag is not None and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Data(DataModule):
    def __init__(self, flag: str, **settings: Any) -> None:
        super().__init__(BATCH_SIZE, num_workers=2, **settings)
        self.flag = Path(flag)

    def make_dataset(self, split: str) -> Dataset[Any]:
        dataset = Dying(NUM_TRAIN if split == "train" else NUM_VAL)
        if split == "train":
            dataset.flag = self.flag
        return dataset
