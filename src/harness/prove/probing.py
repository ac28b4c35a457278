"""Looks into one training step of the owner's module: what it draws and writes."""

import inspect
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from harness.data.batches import Batch, GlobalBatchSampler
from harness.data.randomness import seed_generators
from harness.data.shared_batches import SharedBatchSampler
from harness.data.sharing import leaves
from harness.exact.sync_batch_norm import BATCH_NORMS
from harness.places import definition
from harness.prove.loss_kinds import kind_of_loss
from harness.prove.recording import caller, snapshot
from harness.prove.restoring import unchanged

DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"}
DRAWS |= {"bernoulli", "bernoulli_", "normal", "normal_", "uniform_", "random_", "exponential_"}
DRAWS |= {"multinomial", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d"}
DRAWS |= {"alpha_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax", "cauchy_"}
LARGEST = 2048  # numbers of a gradient that are compared, evenly spaced


class Probe(pl.Callback):
    """Look into the first training step, write what is found, and end the process.

    Args:
        path: of the JSON file.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look, and leave: nothing of this process is worth anything afterwards."""
        facts: dict[str, Any] = {
            "automatic": pl_module.automatic_optimization,
            "place": str(definition(pl_module, "training_step") or ""),
        }
        steps = Steps(trainer, pl_module)
        questions: dict[str, Callable[[], Any]] = {
            "step": steps.look,
            "loss": lambda: kind_of_loss(steps),
        }
        if not pl_module.automatic_optimization:
            del questions["loss"]
        for name, question in questions.items():
            try:
                facts[name] = question()
            except Exception as error:  # of the owner's code in an unusual place: not looked into
                facts[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        self.path.write_text(json.dumps(facts))
        os._exit(0)


class Steps:
    """The training step of a module, for any samples of the first global batch."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.trainer, self.module = trainer, module
        found = leaves(trainer.train_dataloader)
        self.loader = found[0]
        sampler: Any = getattr(self.loader, "batch_sampler", None)
        self.is_known = len(found) == 1 and isinstance(
            sampler, (GlobalBatchSampler, SharedBatchSampler)
        )
        self.indices: list[Any] = []
        if self.is_known:
            drawn = iter(sampler)
            for _ in range(int(trainer.accumulate_grad_batches)):
                self.indices += next(drawn)
        takes = list(inspect.signature(module.training_step).parameters)
        self.takes_index = len(takes) > 1
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        vars(module)["log"] = vars(module)["log_dict"] = lambda *_, **__: None

    def read(self, indices: list[Any]) -> Any:
        """A batch of these samples, as the step gets it."""
        samples: Any = self.loader.dataset
        batch = self.loader.collate_fn(samples.__getitems__(Batch(indices, 0)))
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.module.on_before_batch_transfer(batch, 0)
        return self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def run(self, batch: Any, seed: int = 0) -> Any:
        """The loss of a batch; what the step writes into the module stays."""
        seed_generators(seed)
        for part in self.module.modules():
            if isinstance(part, BATCH_NORMS):  # which is looked at apart
                part.eval()
        output: Any = self.trainer.strategy.training_step(batch, *[0] * self.takes_index)
        return output.get("loss") if isinstance(output, dict) else output

    def gradient(self, indices: list[Any], seed: int = 0) -> tuple[float, Tensor]:
        """The loss of some samples, and numbers of its gradient; the module stays as it was."""
        batch = self.read(indices)
        with unchanged(self.module), torch.enable_grad():
            loss = self.run(batch, seed)
            if loss is None:
                raise ValueError("the step returned no loss")
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        flat = [
            (torch.zeros_like(p) if g is None else g).reshape(-1)[:: -(-p.numel() // LARGEST)]
            for p, g in zip(self.parameters, found, strict=True)
            if p.numel()
        ]
        return float(loss.detach()), torch.cat([g.detach().to("cpu", torch.float64) for g in flat])

    def look(self) -> dict[str, Any]:
        """What the step draws and writes."""
        if not self.is_known:
            return {}
        whole = self.read(self.indices)
        before = snapshot(self.module)
        with unchanged(self.module), Draws() as draws, torch.no_grad():
            seed_generators(0)
            generators = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
            if self.module.automatic_optimization:
                self.run(whole)
            if generators != (random.getstate(), np.random.get_state()[1].tolist()):  # type: ignore[index]
                draws.places.setdefault("random or numpy.random", "")
            after = snapshot(self.module)
        few = len(self.indices) - 1
        with unchanged(self.module), torch.no_grad():
            if few and self.module.automatic_optimization:
                self.run(self.read(self.indices[:few]))
            of_fewer = snapshot(self.module)
        metrics = {n for n, m in self.module.named_modules() if isinstance(m, Metric)}
        written = [
            name
            for name, kept in before.items()
            if kept.kind != "parameter"
            and name in after
            and after[name].checksum != kept.checksum
            and after[name].checksum != of_fewer[name].checksum  # else it is no matter of samples
            and name.rpartition(".")[0] not in metrics
        ]
        return {"draws": draws.places, "written": written}


class Draws(TorchFunctionMode):
    """Notes where random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_idle = "dropout" in name and not (kwargs.get("training", True) and _share(args, kwargs))
        if name in DRAWS and not is_idle:
            self.places.setdefault(caller() or name, name)
        return func(*args, **kwargs)


def _share(args: Any, kwargs: Any) -> Any:
    return kwargs.get("p", args[1] if len(args) > 1 else 0.5)
