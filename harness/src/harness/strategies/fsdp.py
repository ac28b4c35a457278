"""fsdp: a process per device, each with a part of every parameter, gradient and optimizer state.

torch's ``fully_shard`` (FSDP 2) inside of Lightning's DDP strategy. In: a whole module, and whole
checkpoints of any strategy; out: whole checkpoints. Lightning's ``FSDPStrategy`` is FSDP 1, which
refuses CPUs, 64-true and clipping by norm; ``ModelParallelStrategy`` asks modules for code.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper, wraps
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
from torch.optim import LBFGS, Optimizer

from harness.errors import UserError
from harness.names import as_names
from harness.shards import has_parts, parted_like, whole
from harness.upstream import callbacks_of

from .dp import named_parts

METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
INSTEAD = "Do it in a hook, as on_train_batch_start, or use strategy=ddp."


class FSDPStrategy(DDPStrategy):
    """Give each process a part of every parameter.

    Parameters are whole during a step, and those of some submodules only while these compute.

    Args:
        modules: these submodules, such as ["net.encoder"]; by default the blocks, which are in a
            ``ModuleList`` or a ``Sequential`` and have submodules themselves.
        reshard_after_forward: free their memory between their forward and their backward; false is
            faster, and takes memory for the whole network.
    """

    strategy_name = "fsdp"

    def __init__(
        self, *, modules: Sequence[str] | None = None, reshard_after_forward: bool = True
    ) -> None:
        super().__init__()
        self.modules = None if modules is None else as_names(modules)
        self.reshard_after_forward = reshard_after_forward

    @property
    def module(self) -> pl.LightningModule:
        """Return the module that is trained."""
        assert self.lightning_module is not None
        return self.lightning_module

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse what would not train as on one device, and give each process its parts."""
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        averages = (WeightAveraging, StochasticWeightAveraging)
        _refuse(any(isinstance(one, averages) for one in callbacks_of(trainer)), "averaged weights")
        _refuse(trainer.precision == "16-mixed", "trainer.precision=16-mixed; bf16-mixed it has")
        if is_fitting:
            _refuse(not self.module.automatic_optimization, "manual optimisation")
            super().setup(trainer)
            _refuse(any(isinstance(one, LBFGS) for one in self.optimizers), "LBFGS")
            return
        # Lightning's setup of an evaluation would make all parts those of rank 0.
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.module)
        self.model_to_device()
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Shard the module, unit by unit: no device ever holds the whole."""
        if not any(map(has_parts, self.module.parameters())):
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                # fully_shard refuses layouts such as channels last.
                at_start = tensor.detach().to(self.root_device).contiguous()
                dist.broadcast(at_start, src=0)  # as DDP does
                tensor.data = at_start.to(tensor.device)
            self._shard(self.module)
        self.module.to(self.root_device)

    def _shard(self, module: pl.LightningModule) -> None:
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        num_parameters = len({*module.parameters()})
        for unit in units(module, self.modules):
            fully_shard(unit, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
            refuse_changes(unit)
        if not all(map(has_parts, module.parameters())):
            root = Root(module)
            fully_shard(root, mesh=mesh, reshard_after_forward=False)
            refuse_changes(root)
            for name in METHODS:
                method = getattr(module, name)
                setattr(module, name, update_wrapper(partial(root.call, method), method))
        if len({*module.parameters()}) > num_parameters:  # torch has made one for each
            raise UserError(
                "strategy=fsdp would untie a parameter that two blocks share.\nUse "
                "trainer.strategy.modules=[], which has no blocks, or name others."
            )
        module.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]

    def configure_ddp(self) -> None:
        """Wrap nothing: ``fully_shard`` reduces gradients."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Gather the whole tensors on the CPU of the first process; all processes call it."""
        return self._gathered(self.module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what the optimizer of one device has; all processes call it."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        parts = {key: self._gathered(values) for key, values in state["state"].items()}
        return {**state, "state": parts}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this process's parts of what any strategy has saved."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            keys = [key for group in saved["param_groups"] for key in group["params"]]
            params = [p for group in optimizer.param_groups for p in group["params"]]
            parts: dict[Any, dict[str, Any]] = {}
            for key, parameter in zip(keys, params, strict=True):
                for name, value in saved["state"].get(key, {}).items():
                    part = parted_like(value, parameter) if torch.is_tensor(value) else value
                    parts.setdefault(key, {})[name] = part
            optimizer.load_state_dict({**saved, "state": parts})

    def _gathered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same with whole tensors; a device holds one at a time."""
        gathered = {}
        for name, value in values.items():
            is_tensor = isinstance(value, Tensor)
            full = whole(value.detach()) if is_tensor else value
            if self.is_global_zero:
                gathered[name] = full.cpu() if is_tensor else full
        return gathered


class Root(nn.Module):
    """Make parameters that are in no unit whole while a method of the module runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.is_running = module, False

    def forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method between the hooks of ``fully_shard``."""
        return method(*args, **kwargs)

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method, which may call another one."""
        if self.is_running:
            return method(*args, **kwargs)
        self.is_running = True
        try:
            return self(method, *args, **kwargs)
        finally:
            self.is_running = False


def units(module: pl.LightningModule, names: Sequence[str] | None = None) -> list[nn.Module]:
    """Return the submodules that are made whole by themselves, inner ones first."""
    chosen = {*named_parts(module, names or ())}
    if names is None:
        lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        blocks = [block for part in lists for block in part.children()]
        chosen = {m for m in blocks if [*m.children()] and next(m.parameters(), None) is not None}
    return [part for part in reversed([*module.modules()]) if part in chosen]


def refuse_changes(unit: nn.Module) -> None:
    """Refuse a forward that changes whole parameters in place of the parts, where it is lost.

    Looked at are what its first training call writes, and what any call freezes or thaws.
    """
    forward, is_checked = unit.forward, False

    def flags() -> list[bool]:
        return [parameter.requires_grad for parameter in unit.parameters()]

    def norms() -> dict[str, Tensor]:
        named = unit.named_parameters()
        return {name: p.detach().double().norm() for name, p in named if not has_parts(p)}

    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_checked
        is_looked_at = unit.training and not is_checked
        trained, before = flags(), norms() if is_looked_at else {}
        output = forward(*args, **kwargs)
        after = norms() if before else {}
        written = any(norm != after.get(name, norm) for name, norm in before.items())
        if written or trained != flags():
            what = "writes into parameters" if written else "freezes or unfreezes"
            raise UserError(f"strategy=fsdp: a step {what}, which would be lost. {INSTEAD}")
        is_checked |= unit.training
        return output

    unit.forward = wraps(forward)(checked)


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let ``load_state_dict`` take whole tensors."""
    for name, parameter in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if name in state_dict:
            state_dict[name] = parted_like(state_dict[name], parameter)


def _refuse(is_there: bool, what: str) -> None:
    if is_there:
        raise UserError(f"strategy=fsdp has no {what}. Leave it out, or use strategy=ddp.")
