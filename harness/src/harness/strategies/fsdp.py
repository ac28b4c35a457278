"""fsdp: a process per device, each with a part of every parameter, gradient and optimizer state.

It is torch's ``fully_shard`` (FSDP 2) inside of Lightning's DDP strategy, which brings processes,
launchers and groups. Lightning's own ``FSDPStrategy`` is FSDP 1, which refuses CPUs, 64-true and
clipping by norm; ``ModelParallelStrategy`` asks each module for code, and refuses 64-true. Both
refuse to write as ``SafePoint`` asks them to. Checkpoints here are those of one device.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from harness.errors import UserError
from harness.names import as_names
from harness.shards import has_parts, parted_like, whole
from harness.strategies.whole_parameters import Root, refuse_writes
from harness.upstream.inference import use_no_grad
from harness.upstream.replication import is_compiled, synchronises_batch_norm

METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class FSDPStrategy(DDPStrategy):
    """Gives each process a part of every parameter, which are whole only while they compute.

    Parameters are whole during a step, and those of blocks (what is in a ``ModuleList`` or a
    ``Sequential``, and has parts itself) only while the block computes.

    Args:
        modules: further submodules that are whole only while they compute, such as ["net.encoder"].
            With manual optimisation all that steps call: by default the module's children.
        blocks: whether blocks are.
        reshard_after_forward: give a block's memory back between its forward and its backward;
            false is faster, and takes memory for the whole network.
    """

    strategy_name = "fsdp"

    def __init__(
        self,
        *,
        modules: Sequence[str] | None = None,
        blocks: bool = True,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        self.modules = None if modules is None else as_names(modules)
        self.blocks, self.reshard_after_forward = blocks, reshard_after_forward
        self.has_looked, self.flags = False, [False]

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse what would not train as on one device, and give each process its parts."""
        assert self.lightning_module is not None
        _check(trainer, self.lightning_module)
        self.has_looked = False
        use_no_grad(trainer)  # parameters that are made whole stay for training
        if trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
                raise UserError("strategy=fsdp has no LBFGS, which joins all gradients. Use ddp.")
            return
        assert self.accelerator is not None  # Lightning's would make all parts those of rank 0
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Give each process its part, one unit after another: no device ever holds the whole."""
        module = self.lightning_module
        assert module is not None
        if not any(map(has_parts, module.parameters())):
            for tensor in [*module.parameters(), *module.buffers()]:
                # Parts of other layouts, such as channels last, there are not.
                at_start = tensor.detach().to(self.root_device).contiguous()
                dist.broadcast(at_start, src=0)  # as DDP does
                tensor.data = at_start.to(tensor.device)
            self._shard(module)
        module.to(self.root_device)

    def _shard(self, module: pl.LightningModule) -> None:
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        # All are known before the first has parts, which are other parameters.
        for unit in [*units(module, self.modules, self.blocks)]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
            refuse_writes(unit, module)
        if not all(map(has_parts, module.parameters())):
            if not module.automatic_optimization:  # whose backward is inside of the step
                name = next(n for n, p in module.named_parameters() if not has_parts(p))
                raise UserError(
                    f"strategy=fsdp: {name} is in no part that training_step calls, or in two of "
                    "them, which manual optimisation needs. Name those in trainer.strategy.modules."
                )
            root = Root(module)
            fully_shard(root, mesh=mesh, reshard_after_forward=False)
            refuse_writes(root, module)
            for name in METHODS:
                setattr(module, name, root.making_whole(getattr(module, name)))
        module.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Refuse BatchNorm whose statistics would be each process's own.

        Raises:
            UserError: with what to type.
        """
        super().on_train_batch_start(batch, batch_idx)
        module = self.lightning_module
        assert module is not None
        self.flags = _flags(module)
        if self.has_looked or self.world_size == 1:
            return
        self.has_looked = True  # what is frozen is in evaluation by now
        layers = [m for m in module.modules() if isinstance(m, BATCH_NORMS)]
        if any(m.training for m in layers) and not synchronises_batch_norm(self):
            raise UserError(
                "strategy=fsdp leaves each process the BatchNorm statistics of its own share. "
                "Use trainer.sync_batchnorm=true, GroupNorm, or .eval() for what is frozen."
            )

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Refuse what a step has frozen or unfrozen, which its whole parameters alone know.

        Raises:
            UserError: with what to do instead.
        """
        super().pre_backward(closure_loss)
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization and self.flags != _flags(module):
            raise UserError(
                f"{type(module).__name__}.training_step freezes or unfreezes parameters, which "
                "strategy=fsdp does not see. Unfreeze it before the step, in on_train_batch_start."
            )

    def teardown(self) -> None:
        """See Lightning's; after an exception in a step, what it was computing stays."""
        try:
            super().teardown()
        except RuntimeError as error:
            if error.__context__ is None:
                raise

    def configure_ddp(self) -> None:
        """Wrap nothing: the parts are there."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole tensors on the CPU, in the first process; all processes call it."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        return self._gathered(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As the optimizer of one device has it; all processes call it."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        parts = {key: self._gathered(values) for key, values in state["state"].items()}
        return {**state, "state": parts}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this process's parts of what any strategy has saved."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            keys = [key for group in saved["param_groups"] for key in group["params"]]
            params = [p for group in optimizer.param_groups for p in group["params"]]
            of = dict(zip(keys, params, strict=True))
            parts = {
                key: {
                    name: parted_like(value, of[key]) if isinstance(value, Tensor) else value
                    for name, value in values.items()
                }
                for key, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": parts})

    def _gathered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same with whole tensors, which one device holds one at a time."""
        found = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = whole(value.detach())
                value = value.cpu() if self.is_global_zero else None
            found[name] = value
        return found if self.is_global_zero else {}


def units(
    module: pl.LightningModule, names: Sequence[str] | None = None, blocks: bool = True
) -> Iterator[nn.Module]:
    """What is made whole by itself, inner parts first.

    Blocks are what has parts, and is in a ``ModuleList`` or a ``Sequential``. Parts that share a
    parameter with others are left out: all that use it must be one.

    Raises:
        UserError: if there is no part of a name.
    """
    known = dict(module.named_modules())
    if unknown := [name for name in names or () if not name or name not in known]:
        raise UserError(
            f"trainer.strategy.modules: there is no {unknown[0] or 'part without a name'} in "
            f"{type(module).__name__}."
        )
    inner = [
        child
        for part in reversed(known.values())
        if blocks and isinstance(part, (nn.ModuleList, nn.Sequential))
        for child in part.children()
        if any(True for _ in child.children())
    ]
    outer = [known[name] for name in names or ()]
    if names is None and not module.automatic_optimization:
        outer = list(_called(module))
    holders = _holders(module)
    for unit in dict.fromkeys([*inner, *outer]):
        inside = _holders(unit)
        if inside and all(num == holders[parameter] for parameter, num in inside.items()):
            yield unit


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost parts of a module that can be called."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:  # a ModuleList or ModuleDict
            yield from _called(child)
        else:
            yield child


def _holders(module: nn.Module) -> Counter[nn.Parameter]:
    """How many modules have each parameter for their own."""
    return Counter(p for part in module.modules() for p in part.parameters(recurse=False))


def _flags(module: nn.Module) -> list[bool]:
    """Which parameters are trained."""
    return [parameter.requires_grad for parameter in module.parameters()]


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let ``load_state_dict`` take whole tensors."""
    for name, parameter in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if name in state_dict:
            state_dict[name] = parted_like(state_dict[name], parameter)


def _check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse what this strategy cannot keep.

    Raises:
        UserError: with what to use instead.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
    averages = (WeightAveraging, StochasticWeightAveraging)
    reasons = {
        "averaged weights (callbacks=ema), which copy whole ones": any(
            isinstance(callback, averages) for callback in callbacks
        ),
        "trainer.precision=16-mixed; bf16-mixed it has": trainer.precision == "16-mixed",
        "compiled networks": any(map(is_compiled, module.modules())),
        "CPUs with torch 2.6; a newer one has them": (
            trainer.strategy.root_device.type == "cpu"
            and not hasattr(torch.cpu.Stream, "record_event")
        ),
        "lazy parameters": any(map(is_lazy, module.parameters())),
        "parameters without a dimension": any(not p.dim() for p in module.parameters()),
    }
    for what, is_there in reasons.items():
        if is_there:
            raise UserError(f"strategy=fsdp has no {what}. Leave it out, or use strategy=ddp.")
