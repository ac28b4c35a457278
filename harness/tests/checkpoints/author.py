"""What authors keep in checkpoints: as the best-known Hydra template does, and in every state."""

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from small.data import Synthetic
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tests.faults.plain_module import PlainModule

CPU = torch.device("cpu")


class Colour(enum.Enum):
    RED = 1


HYPER_PARAMETERS: dict[str, Any] = {
    "partial": lambda: partial(torch.optim.SGD, lr=0.1),
    "DictConfig": lambda: OmegaConf.create({"a": [1, 2]}),
    "Enum": lambda: Colour.RED,
    "class": lambda: nn.ReLU,
    "objects": lambda: np.array([None, "a"], dtype=object),
}
# Nothing is said of these: they are read as they were.
KNOWN: dict[str, Any] = {
    "scalar": lambda: np.float64(0.1),
    "whole number": lambda: np.int64(3),
    "array": lambda: np.arange(6, dtype=">f4").reshape(2, 3),
    "Fortran array": lambda: np.asfortranarray(np.ones((2, 3))),
    "texts": lambda: np.array(["a", "bc"]),
    "times": lambda: np.array(["2026-01-01"], "M8[s]"),
    "deque": lambda: deque([1.0, np.float32(2)], maxlen=3),
    "defaultdict": lambda: defaultdict(list, a=[1]),
    "Counter": lambda: Counter("aab"),
    "OrderedDict": lambda: OrderedDict(b=1, a=(2, None)),
    "set": lambda: {1, "a"},
    "frozenset": lambda: frozenset([1]),
    "complex": lambda: 1 + 2j,
    "bytes": lambda: b"a\xff",
    "bytearray": lambda: bytearray(b"a\xff"),
    "generator": lambda: np.random.RandomState(0).get_state(),
    "tensor with a note": lambda: noted(torch.ones(2)),
    "parameter with a note": lambda: noted(nn.Parameter(torch.ones(2))),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "dtype of torch": lambda: {torch.float16: CPU},
}


def noted(tensor: Tensor) -> Tensor:
    tensor.note = 0.5  # type: ignore[attr-defined]
    return tensor


class Template(PlainModule):
    """The best-known template's way: what builds the module is a hyper-parameter."""

    def __init__(self, net: nn.Module, optimizer: Any, **_: Any) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        kept = {name: make() for name, make in HYPER_PARAMETERS.items()}
        self.save_hyperparameters({"kept": kept}, logger=False)


class CountingLR(LRScheduler):
    """Its state is all that it has, as torch's default is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.recent: deque[Any] = deque(maxlen=2)
        self.factor = np.float64(1.0)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.factor = self.factor * np.float64(0.9)
        self.recent.append(self.factor)
        return [group["initial_lr"] * sum(self.recent) for group in self.optimizer.param_groups]


class Keeping(PlainModule):
    """Keeps known kinds in hyper-parameters, in its optimizer, schedule and a key of its own."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.save_hyperparameters({name: make() for name, make in KNOWN.items()}, logger=False)
        self.losses = np.zeros(4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses[batch_idx % 4] += loss.item()
        return loss * float(1 + self.losses.sum() % 1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = self.losses.copy()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses = checkpoint["losses"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=np.float64(0.1), momentum=0.9)
        schedule = {"scheduler": CountingLR(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class KeepingData(Synthetic):
    """Keeps the shape of its samples, as a NumPy array, and a path among its hyper-parameters."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters({"folder": Path("data"), "mean": np.ones(2)}, logger=False)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"shape": np.array([8, 8])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert (state_dict["shape"] == [8, 8]).all()
        super().load_state_dict(state_dict)


class Recorder(pl.Callback):
    """Keeps every known kind, and changes what the run learns by what it kept."""

    def __init__(self) -> None:
        self.kept = {name: make() for name, make in KNOWN.items()}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        loss = outputs["loss"].item()
        self.kept["scalar"] += np.float64(loss)
        self.kept["deque"].append(np.float32(loss))
        self.kept["defaultdict"][len(self.kept["defaultdict"])].append(loss)
        self.kept["array"][0] += loss
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(1 - 0.001 * float(self.kept["deque"][0]))

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict


class Odd(pl.Callback):
    """Keeps what no resume can read."""

    def __init__(self) -> None:
        self.made = Colour.RED

    def state_dict(self) -> dict[str, Any]:
        return {"history": [1.0, self.made], "executed": Executed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made = state_dict["history"][1]


class Executed:
    """Notes when a file that holds it is read by executing what it names."""

    times: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return Executed.read, ()

    @staticmethod
    def read() -> "Executed":
        Executed.times.append(1)
        return Executed()


class OddKeyRead(PlainModule):
    """Adds objects to checkpoints, and reads one."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"colour": Colour.RED, "executed": Executed()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.colour = checkpoint["colour"].value
