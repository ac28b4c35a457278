import logging
import math
from functools import lru_cache
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from harness.errors import TrainingError
from harness.shards import has_parts
from harness.strategies.sync_batch_norm import NORMS, SyncBatchNorm

log = logging.getLogger(__name__)

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Integers hashed at once; a CPU keeps this many, and what is computed of them, in its cache.
CHUNK = {"cpu": 2**16}
LARGE_CHUNK = 2**22
GOLDEN = 0x9E3779B97F4A7C15  # the golden ratio's 64 bits: its multiples have no pattern


class Replicas(pl.Callback):
    """Stop the run when the replicas of the model are no longer equal by bit.

    Every process hashes each tensor to 64 bits, and the hashes are gathered: a few bytes per
    tensor, whatever its size. Compared are all parameters; buffers that training does not change;
    and BatchNorm's statistics where they are computed over all processes. Other buffers that a
    step changes, such as the statistics of plain BatchNorm, belong to each process until DDP
    overwrites them with the first one's at the next forward: of those that are no norm's, a line
    tells.

    Args:
        every_n_steps: check before training, after the first batch, after as many steps, before a
            checkpoint to go on from, and at the end; ``null`` leaves out those by number.
    """

    def __init__(self, every_n_steps: int | None = 1000) -> None:
        self.every_n_steps = math.inf if every_n_steps is None else every_n_steps
        self.is_watching, self.has_checked = False, False
        self.told: set[str] = set()  # buffers that each process writes from its own samples

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the buffers, to know later which of them training changes."""
        strategy = trainer.strategy
        self.is_watching = trainer.world_size > 1 and isinstance(strategy, DDPStrategy)
        if trainer.world_size > 1 and not self.is_watching:
            log.info(
                "Replicas are not compared: %s may give each process a part of the model.",
                type(strategy).__name__,
            )
        self.checked_step, self.has_checked = trainer.global_step, False
        if self.is_watching:
            self.first = hashes(list(pl_module.buffers()), pl_module.device)
            self.check(trainer, pl_module)  # what hooks have written until now
            self.has_checked = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Check when it is time."""
        every = self.every_n_steps
        is_due = trainer.global_step // every > self.checked_step // every
        if self.is_watching and (is_due or not self.has_checked):
            self.check(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Check what a run would go on from, before it is written; called in every process."""
        if self.is_watching and "safe_point" in checkpoint:
            self.check(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the end."""
        if self.is_watching and trainer.global_step > self.checked_step:
            self.check(trainer, pl_module)

    def check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare; all processes call it.

        Raises:
            TrainingError: in every process, naming the first tensor and the ranks that differ.
        """
        self.checked_step, self.has_checked = trainer.global_step, True
        # Under fsdp no process has a replica of a parameter.
        parameters = [pair for pair in pl_module.named_parameters() if not has_parts(pair[1])]
        named = [*parameters, *pl_module.named_buffers()]
        mine = hashes([tensor for _, tensor in named], pl_module.device)
        everyone = trainer.strategy.all_gather(mine)  # (ranks, tensors)
        differs = everyone != everyone[0]
        # Training changes a buffer in every process; one that is as it was in some drifts.
        num_parameters = len(named) - len(self.first)
        drifts = (everyone[:, num_parameters:] == self.first).any(dim=0)
        over_all = synchronised(pl_module)
        is_over_all = [name in over_all for name, _ in named[num_parameters:]]
        must_agree = drifts | torch.tensor(is_over_all, device=mine.device).bool()
        is_own = differs.any(dim=0)
        is_own[:num_parameters] = False
        is_own[num_parameters:] &= ~must_agree
        differs[:, num_parameters:] &= must_agree
        found = torch.cat([differs, is_own[None]]).cpu()  # the only wait for the device
        differs, is_own = found[:-1], found[-1]
        self._tell(trainer, pl_module, [named[i][0] for i in is_own.nonzero().flatten().tolist()])
        if not differs.any():
            return
        first = int(differs.any(dim=0).nonzero()[0])
        ranks = differs[:, first].nonzero().flatten().tolist()
        num_differing = int(differs.any(dim=0).sum())
        others = f" ({num_differing - 1} more tensors differ)" if num_differing > 1 else ""
        why = (
            "Something changes the model in one process alone, such as code under `if rank == 0`, "
            "a parameter that DDP does not know, or what is computed from one process's data."
        )
        message = (
            f"Step {self.checked_step}: the replicas differ. {named[first][0]} on rank "
            f"{', '.join(map(str, ranks))} is not that of rank 0{others}.\n{why}"
        )
        if unused := without_gradient(trainer, pl_module):  # DDP waits for them
            shown = ", ".join(unused[:3]) + f" and {len(unused) - 3} more" * (len(unused) > 3)
            message = (
                f"Step {self.checked_step}: these parameters have no part in the loss, and DDP has "
                f"not averaged all gradients: {shown}.\nUse or freeze them, or, as for both "
                "networks of a GAN, set trainer.strategy.find_unused_parameters=true."
            )
        if trainer.is_global_zero:
            log.error(message)
        raise TrainingError(message)

    def _tell(self, trainer: pl.Trainer, pl_module: pl.LightningModule, names: list[str]) -> None:
        """Say once which buffers hold what one process has seen."""
        for name in names:
            path, _, own = name.rpartition(".")
            owner = pl_module.get_submodule(path)
            if isinstance(owner, NORMS) or name in self.told:
                continue
            self.told.add(name)
            if trainer.is_global_zero:
                log.warning(
                    "Buffer %s of %s is written by each process from its own samples; process 0's "
                    "is kept: not what one process would have. Gather what is written first, as "
                    "in x = self.all_gather(x).flatten(0, -2).",
                    own,
                    type(owner).__name__,
                )


def without_gradient(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """The trained parameters that the last step has left out, where DDP expects all of them."""
    model = getattr(trainer.strategy, "model", None)
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    unused = [name for name, parameter in trained if parameter.grad is None]
    is_expected = getattr(model, "find_unused_parameters", False) or len(unused) == len(trained)
    return [] if is_expected else unused


def synchronised(module: nn.Module) -> set[str]:
    """Names of the buffers that are computed over all processes."""
    return {
        f"{name}.{key}"
        for name, child in module.named_modules()
        if isinstance(child, (nn.SyncBatchNorm, SyncBatchNorm))
        for key, _ in child.named_buffers(recurse=False)
    }


@torch.no_grad()
def hashes(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Hash each tensor's bits, shape (len(tensors),), int64; nothing is copied to the host."""
    factors = odd_factors(CHUNK.get(device.type, LARGE_CHUNK), device)
    found = [hash_of(tensor.to(device), factors) for tensor in tensors]
    return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def hash_of(tensor: Tensor, factors: Tensor) -> Tensor:
    """Sum of the tensor's integers, each times an odd factor of its place, modulo 2^64.

    One changed integer always changes it, because an odd factor has an inverse modulo 2^64;
    several that cancel by chance are as unlikely as a random 64-bit number to be guessed.
    """
    flat = tensor.detach().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    bits = flat.view(-1).view(INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, chunk in enumerate(torch.split(bits, len(factors))):
        # Each chunk has an odd factor as well, so that exchanged chunks differ. It is none of the
        # elements' own: element i of chunk j and element j of chunk i must not share a product.
        factor = (i * GOLDEN | 1) % 2**64
        signed = factor - 2**64 if factor >= 2**63 else factor
        total += (chunk * factors[: len(chunk)]).sum() * signed
    return total


@lru_cache(maxsize=1)
def odd_factors(number: int, device: torch.device) -> Tensor:
    """Fixed odd 64-bit integers without a pattern, shape (number,)."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(-(2**63), 2**63 - 1, (number,), generator=generator)
    return (numbers | 1).to(device)
