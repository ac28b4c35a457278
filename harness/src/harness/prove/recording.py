"""What a run leaves behind for ``prove``: its tensors and metrics after each optimizer step."""

import inspect
import json
import os
import signal
import zlib
from collections.abc import Iterable, Iterator, Sized
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric

from harness.data.sharing import leaves
from harness.data.streams import SharedStream
from harness.exact.evaluation import is_filler, shares_running
from harness.exact.seeded_steps import dropouts
from harness.exact.sync_batch_norm import BATCH_NORMS
from harness.places import definition, is_owners, shown
from harness.prove.short_epochs import shorten
from harness.shards import whole

LARGEST = 65_536  # numbers of a tensor that are kept; of a larger one as many, evenly spaced


class Kept(NamedTuple):
    """One tensor of a module at one step.

    Attributes:
        kind: ``parameter``, ``buffer``, or ``hidden``: what no checkpoint has.
        values: some or all of its numbers, on the CPU.
        checksum: of all of its bytes.
    """

    kind: str
    values: Tensor
    checksum: int


class Recorder(pl.Callback):
    """Write records below ``folder`` and change a run only as far as a comparison needs it.

    Args:
        folder: gets a folder for each process.
        dropout: ``False`` switches all dropout off: two strategies draw other masks.
        batch_norm: ``False`` lets BatchNorm use, and keep, its running statistics.
        kill_after: the step after which the run kills itself, once.
        nudge: move each initial weight by this share of itself, as rounding does.
    """

    def __init__(
        self,
        folder: str,
        dropout: bool = True,
        batch_norm: bool = True,
        kill_after: int | None = None,
        nudge: float = 0.0,
    ) -> None:
        self.folder, self.dropout, self.batch_norm = Path(folder), dropout, batch_norm
        self.kill_after, self.nudge = kill_after, nudge
        self.last_step = 0
        self.batches: list[tuple[int, int, int | None]] = []  # of the evaluation that runs
        self.logged: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}
        self.dtypes: set[str] = set()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Shorten the epochs, and listen to what is logged."""
        self.folder = self.folder / f"rank_{trainer.global_rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        if stage == "fit":
            source = getattr(trainer, "datamodule", None) or pl_module
            if is_overridden("train_dataloader", source):
                make = source.train_dataloader
                vars(source)["train_dataloader"] = partial(shorten, make, trainer)
        if "log" not in vars(pl_module):
            vars(pl_module)["log"] = partial(self._log, trainer, pl_module.log)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the next stage choose its folder anew."""
        self._write_facts()
        self.folder = self.folder.parent
        vars(pl_module).pop("log", None)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch dropout off, and note what the module is made of."""
        self.facts["dropout"] = list(dropouts(pl_module, switch_off=not self.dropout))
        self.facts["batch_norm"] = [
            name for name, m in pl_module.named_modules() if isinstance(m, BATCH_NORMS)
        ]
        self.facts["module"] = type(pl_module).__name__
        self.facts["place"] = str(definition(pl_module, "training_step") or "training_step")
        self.facts["draws"] = False
        if self.nudge and trainer.ckpt_path is None:
            with torch.no_grad():
                for parameter in filter(torch.is_floating_point, pl_module.parameters()):
                    parameter.mul_(1 + self.nudge)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the beginning, also that of a run that goes on."""
        self.last_step = trainer.global_step
        loaders = leaves(trainer.train_dataloader)
        self.facts["stream"] = any(isinstance(loader, SharedStream) for loader in loaders)
        self._save(f"start_{trainer.global_step}", state=snapshot(pl_module))

        def note(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                self.dtypes |= set() if isinstance(module, Metric) else {str(output.dtype)[6:]}

        self.hook = nn.modules.module.register_module_forward_hook(note)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Freeze BatchNorm, which ``train()`` has thawed."""
        for module in pl_module.modules() if not self.batch_norm else ():
            if isinstance(module, BATCH_NORMS):
                module.eval()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Note whether the step has drawn random numbers, for which it was seeded."""
        device = pl_module.device
        ours = torch.cuda.default_generators[device.index] if device.type == "cuda" else None
        for drawn in filter(None, (torch.default_generator, ours)):
            fresh = torch.Generator(drawn.device).manual_seed(drawn.initial_seed())
            self.facts["draws"] |= not torch.equal(fresh.get_state(), drawn.get_state())

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Keep what a step has made, and be killed where that is asked for."""
        step = trainer.global_step
        if step == self.last_step:
            return
        self.last_step = step
        self.hook.remove()
        self.facts["dtypes"] = sorted(self.dtypes)
        self._save(f"step_{step}", state=snapshot(pl_module), metrics=numbers(trainer))
        self._write_facts()
        mark = self.folder.parent / "killed"
        if self.kill_after is not None and step >= self.kill_after and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the batches of this evaluation."""
        self.batches = []

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Recognise a batch by its bytes."""
        if not is_filler(trainer, batch_idx, dataloader_idx):
            sharing = shares_running(trainer, dataloader_idx)
            count = getattr(sharing, "num_samples_in", None)
            num = count(batch_idx) if callable(count) else None
            self.batches.append((dataloader_idx, checksum_of(batch), num))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the metrics that callbacks look at."""
        if not trainer.sanity_checking:
            name = "test" if trainer.testing else "val"
            metrics = numbers(trainer)
            self._save(f"{name}_{trainer.global_step}", metrics=metrics, batches=self.batches)

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_end = on_validation_end

    def _log(
        self, trainer: pl.Trainer, log: Any, name: str, value: Any, *args: Any, **how: Any
    ) -> Any:
        """Note where and how something is logged; then log it."""
        entry = self.logged.setdefault(name, {"stages": [], "place": "", "how": {}, "kind": ""})
        stage = "evaluation" if trainer.evaluating else "training"
        if stage not in entry["stages"]:
            entry["stages"].append(stage)
            entry["place"], entry["kind"] = caller(), type(value).__name__
            entry["how"] = {
                key: v if isinstance(v, (bool, int, str)) else getattr(v, "__name__", str(v))
                for key, v in how.items()
            }
        return log(name, value, *args, **how)

    def _save(self, name: str, **record: Any) -> None:
        part = self.folder / f"{name}.part"
        torch.save(record, part)
        part.replace(self.folder / f"{name}.pt")

    def _write_facts(self) -> None:
        facts = self.facts | {"logged": self.logged}
        (self.folder / "facts.json").write_text(json.dumps(facts))


def snapshot(module: nn.Module) -> dict[str, Kept]:
    """Every tensor that a module holds, by its name, and the numbers that are its attributes."""
    in_checkpoint = module.state_dict().keys()
    tensors: dict[str, tuple[str, Tensor]] = {
        name: ("parameter", whole(value)) for name, value in module.named_parameters()
    }
    for name, value in module.named_buffers():
        tensors[name] = ("buffer" if name in in_checkpoint else "hidden", value)
    for path, part in module.named_modules():
        for key, value in vars(part).items() if not isinstance(part, Metric) else ():
            name = f"{path}.{key}" if path else key
            if isinstance(value, Tensor) and name not in tensors:
                tensors[name] = ("hidden", value)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                tensors[name] = ("hidden", torch.tensor(value, dtype=torch.float64))
            elif isinstance(value, Sized) and type(value).__name__ in ("list", "deque"):
                tensors[f"len({name})"] = ("hidden", torch.tensor(len(value)))
    return {
        name: keep(kind, value.detach())
        for name, (kind, value) in tensors.items()
        if value.layout is torch.strided and value.device.type != "meta"
    }


def keep(kind: str, value: Tensor) -> Kept:
    """What is kept of a tensor."""
    flat = value.cpu().reshape(-1).contiguous()
    stride = -(-flat.numel() // LARGEST) or 1
    return Kept(kind, flat[::stride].clone(), checksum(flat))


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Of a tensor's bytes."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return zlib.crc32(flat.view(torch.uint8).numpy().data, before)


def checksum_of(batch: Any) -> int:
    """Of all tensors in a batch."""
    found = 0
    for tensor in tensors_of(batch):
        if tensor.layout is torch.strided:
            found = checksum(tensor, found)
    return found


def tensors_of(tree: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors of a batch, also those in objects."""
    if isinstance(tree, Tensor):
        yield tree
        return
    children: Iterable[Any] = ()
    if isinstance(tree, dict):
        children = tree.values()
    elif isinstance(tree, (list, tuple)):
        children = tree
    elif hasattr(tree, "__dict__") and not isinstance(tree, (nn.Module, type)):
        held = tree.to_dict() if hasattr(tree, "to_dict") else vars(tree)  # graphs of PyG
        children = held.values()
    for child in children if depth < 6 else ():
        yield from tensors_of(child, depth + 1)


def numbers(trainer: pl.Trainer) -> dict[str, float]:
    """The logged values that are numbers."""
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if not isinstance(value, Tensor) or value.numel() == 1
    }


def caller() -> str:
    """The innermost line of the owner's that is being executed."""
    frame = inspect.currentframe()
    while frame is not None:
        if is_owners(frame.f_code.co_filename):
            code = frame.f_code
            return f"{shown(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
