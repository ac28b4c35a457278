"""fsdp: each rank has a shard of every parameter, gradient and optimizer state.

The strategy uses torch's ``fully_shard`` (FSDP 2) inside of Lightning's DDP strategy. In: a module,
and unsharded checkpoints of any strategy. Out: unsharded checkpoints. Lightning's ``FSDPStrategy``
is FSDP 1, which refuses CPUs, 64-true and clipping by norm. Lightning's ``ModelParallelStrategy``
needs code in each module.
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

from harness.compat import callbacks_of
from harness.errors import UserError
from harness.keys import as_names
from harness.sharded import full_tensor, is_sharded, shard_like

from .dp import named_submodules

METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
INSTEAD = "Make the change in a hook such as on_train_batch_start, or use strategy=ddp."


class FSDPStrategy(DDPStrategy):
    """Give each rank a shard of every parameter.

    A step gathers the full parameters. Each submodule in ``modules`` has its full parameters only
    while it computes.

    Args:
        modules: submodules to shard separately, such as ["net.encoder"]; by default all blocks.
            A block is a child of a ``ModuleList`` or ``Sequential`` that has submodules itself.
        reshard_after_forward: whether to free the full parameters of ``modules`` between forward
            and backward; false is faster, but needs memory for the full network.
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
        """Check that sharded training can equal training on one device, then shard the module.

        Raises:
            UserError: a setting, a callback or an optimizer does not work with shards.
        """
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        averages = (WeightAveraging, StochasticWeightAveraging)
        has_averages = any(isinstance(callback, averages) for callback in callbacks_of(trainer))
        _refuse(has_averages, "averaged weights", "Leave them out")
        is_half = trainer.precision == "16-mixed"
        _refuse(is_half, "trainer.precision=16-mixed", "Use trainer.precision=bf16-mixed")
        if is_fitting:
            is_manual = not self.module.automatic_optimization
            _refuse(is_manual, "manual optimisation", "Set automatic_optimization=True")
            super().setup(trainer)
            has_lbfgs = any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers)
            _refuse(has_lbfgs, "LBFGS", "Use another optimizer")
            return
        # Lightning's setup of an evaluation would broadcast rank 0's shards to all ranks.
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.module)
        self.model_to_device()
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Shard the module, unit by unit: a device never holds all full parameters."""
        if not any(map(is_sharded, self.module.parameters())):
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                # fully_shard requires contiguous tensors, not channels last.
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
        if not all(map(is_sharded, module.parameters())):
            root = Root(module)
            fully_shard(root, mesh=mesh, reshard_after_forward=False)
            refuse_changes(root)
            for name in METHODS:
                method = getattr(module, name)
                setattr(module, name, update_wrapper(partial(root.call, method), method))
        if len({*module.parameters()}) > num_parameters:  # torch made two of a tied parameter
            raise UserError(
                "strategy=fsdp would untie a parameter that two blocks share.\nUse "
                "trainer.strategy.modules=[] to shard the model as one unit, or name other modules."
            )
        module.register_load_state_dict_pre_hook(_shard_state)  # type: ignore[no-untyped-call]

    def configure_ddp(self) -> None:
        """Wrap nothing: ``fully_shard`` reduces the gradients."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict on rank 0's CPU, and {} elsewhere. All ranks must call it."""
        return self._gathered(self.module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full optimizer state on rank 0, as on one device. All ranks must call it."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        full = {key: self._gathered(values) for key, values in state["state"].items()}
        return {**state, "state": full}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's shards of the full optimizer states in a checkpoint of any strategy."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            keys = [key for group in saved["param_groups"] for key in group["params"]]
            params = [p for group in optimizer.param_groups for p in group["params"]]
            shards: dict[Any, dict[str, Any]] = {}
            for key, parameter in zip(keys, params, strict=True):
                for name, value in saved["state"].get(key, {}).items():
                    shard = shard_like(value, parameter) if torch.is_tensor(value) else value
                    shards.setdefault(key, {})[name] = shard
            optimizer.load_state_dict({**saved, "state": shards})

    def _gathered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with full tensors on rank 0's CPU; a device holds one at a time."""
        gathered = {}
        for name, value in values.items():
            is_tensor = isinstance(value, Tensor)
            full = full_tensor(value.detach()) if is_tensor else value
            if self.is_global_zero:
                gathered[name] = full.cpu() if is_tensor else full
        return gathered


class Root(nn.Module):
    """Gather the parameters that belong to no unit, while a method of the module runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.is_running = module, False

    def forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method. ``fully_shard`` gathers before ``forward`` and frees after it."""
        return method(*args, **kwargs)

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method, which may call another method of the module."""
        if self.is_running:
            return method(*args, **kwargs)
        self.is_running = True
        try:
            return self(method, *args, **kwargs)
        finally:
            self.is_running = False


def units(module: pl.LightningModule, names: Sequence[str] | None = None) -> list[nn.Module]:
    """Return the submodules whose parameters are gathered separately, inner ones first."""
    chosen = {*named_submodules(module, names or ())}
    if names is None:
        lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        blocks = [block for parent in lists for block in parent.children()]
        chosen = {m for m in blocks if [*m.children()] and next(m.parameters(), None) is not None}
    return [m for m in reversed([*module.modules()]) if m in chosen]


def refuse_changes(unit: nn.Module) -> None:
    """Make a unit's forward raise an error if it changes its parameters.

    Such a forward would change the gathered copies and not the shards, so the change would be lost.
    The first training call is checked for changed values, every call for ``requires_grad``.
    """
    forward, is_checked = unit.forward, False

    def requires_grad() -> list[bool]:
        return [parameter.requires_grad for parameter in unit.parameters()]

    def norms() -> dict[str, Tensor]:
        named = unit.named_parameters()
        return {name: p.detach().double().norm() for name, p in named if not is_sharded(p)}

    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_checked
        checks_values = unit.training and not is_checked
        required, before = requires_grad(), norms() if checks_values else {}
        output = forward(*args, **kwargs)
        after = norms() if before else {}
        is_written = any(norm != after.get(name, norm) for name, norm in before.items())
        if is_written or required != requires_grad():
            change = "writes into parameters" if is_written else "freezes or unfreezes parameters"
            raise UserError(
                f"strategy=fsdp: a step {change}, and this change would be lost. {INSTEAD}"
            )
        is_checked |= unit.training
        return output

    unit.forward = wraps(forward)(checked)


def _shard_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace full tensors by this rank's shards before ``load_state_dict`` reads them."""
    for name, parameter in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if name in state_dict:
            state_dict[name] = shard_like(state_dict[name], parameter)


def _refuse(is_set: bool, setting: str, cure: str) -> None:
    if is_set:
        raise UserError(f"strategy=fsdp does not support {setting}. {cure}, or use strategy=ddp.")
