"""fsdp: a process per device, each with a part of every parameter, gradient and optimizer state.

It is torch's ``fully_shard`` (FSDP 2) inside of Lightning's DDP strategy, with the checkpoints of
one device. Lightning's own ``FSDPStrategy`` is FSDP 1, which refuses CPUs, 64-true and clipping by
norm; ``ModelParallelStrategy`` asks modules for code. Both refuse to write as ``SafePoint`` asks.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
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

from .node_parallel import named_parts

METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


class FSDPStrategy(DDPStrategy):
    """Gives each process a part of every parameter, which are whole only while they compute.

    Parameters are whole during a step, and those of some submodules only while these compute.

    Args:
        modules: these submodules, such as ["net.encoder"]; by default the blocks, which are in a
            ``ModuleList`` or a ``Sequential`` and have parts themselves. With manual optimisation
            all that steps call: by default the module's children as well.
        reshard_after_forward: give their memory back between their forward and their backward;
            false is faster, and takes memory for the whole network.
    """

    strategy_name = "fsdp"

    def __init__(
        self,
        *,
        modules: Sequence[str] | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        self.modules = None if modules is None else as_names(modules)
        self.reshard_after_forward = reshard_after_forward

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse what would not train as on one device, and give each process its parts."""
        assert self.lightning_module is not None
        assert self.accelerator is not None
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
        averages = (WeightAveraging, StochasticWeightAveraging)
        _refuse(any(isinstance(one, averages) for one in callbacks), "averaged weights")
        _refuse(trainer.precision == "16-mixed", "trainer.precision=16-mixed; bf16-mixed it has")
        if trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            _refuse(any(isinstance(one, LBFGS) for one in self.optimizers), "LBFGS")
            return
        self.accelerator.setup(trainer)  # Lightning's would make all parts those of rank 0
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
        for unit in units(module, self.modules):
            fully_shard(unit, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
            refuse_writes(unit)
        if not all(map(has_parts, module.parameters())):
            if not module.automatic_optimization:  # whose backward is inside of the step
                name = next(n for n, p in module.named_parameters() if not has_parts(p))
                raise UserError(
                    f"strategy=fsdp: {name} is in no part that training_step calls, or in two of "
                    "them, which manual optimisation needs. Name those in trainer.strategy.modules."
                )
            root = Root(module)
            fully_shard(root, mesh=mesh, reshard_after_forward=False)
            refuse_writes(root)
            for name in METHODS:
                setattr(module, name, root.making_whole(getattr(module, name)))
        module.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse what a step freezes or unfreezes, which its whole parameters alone know."""
        module = self.lightning_module
        assert module is not None
        before = [parameter.requires_grad for parameter in module.parameters()]
        output = super().training_step(*args, **kwargs)
        after = [parameter.requires_grad for parameter in module.parameters()]
        if module.automatic_optimization and before != after:
            raise UserError(
                f"{type(module).__name__}.training_step freezes or unfreezes parameters, which "
                "strategy=fsdp does not see. Unfreeze it before the step, in on_train_batch_start."
            )
        return output

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
        return self._gathered(self.lightning_module.state_dict())

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


class Root(nn.Module):
    """Makes what is in no unit whole while a method of a module runs, whatever that calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.is_inside = module, False

    def forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the method returns."""
        self.is_inside = True
        try:
            return method(*args, **kwargs)
        finally:
            self.is_inside = False

    def making_whole(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that may be called from outside of a step as well as in it."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs) if self.is_inside else self(method, *args, **kwargs)

        return call


def units(module: pl.LightningModule, names: Sequence[str] | None = None) -> list[nn.Module]:
    """What is made whole by itself, inner parts first.

    Parts that share a parameter with others are left out: all that use it must be one.
    """
    chosen = named_parts(module, names or ())
    if names is None:
        lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        chosen = [m for part in lists for m in part.children() if any(True for _ in m.children())]
        if not module.automatic_optimization:
            chosen += [m for m in module.children() if type(m).forward is not nn.Module.forward]

    def holders(root: nn.Module) -> Counter[nn.Parameter]:
        return Counter(p for part in root.modules() for p in part.parameters(recurse=False))

    everywhere = holders(module)
    inner_first = [m for m in reversed([*module.modules()]) if m in chosen and holders(m)]
    return [m for m in inner_first if all(everywhere[p] == num for p, num in holders(m).items())]


def refuse_writes(unit: nn.Module) -> None:
    """Refuse what the first training call of a unit writes into its whole parameters.

    It would be lost: the next time they are gathered from the parts, which nobody has written.
    """
    before: dict[str, float] = {}

    def norms() -> dict[str, float]:
        named = unit.named_parameters()
        return {name: float(p.detach().double().norm()) for name, p in named if not has_parts(p)}

    def compare(*_: Any) -> None:
        if not unit.training:
            return
        first.remove()
        last.remove()
        if written := [name for name, norm in norms().items() if norm != before.get(name, norm)]:
            raise UserError(
                f"{written[0].removeprefix('module.')} is written in a step, which strategy=fsdp "
                "would lose: it is whole for that time alone.\nWrite it in a hook, such as "
                "on_train_batch_start, or use strategy=ddp."
            )

    first = unit.register_forward_pre_hook(lambda *_: before.update(norms()))
    last = unit.register_forward_hook(compare, prepend=True)  # before parameters are parted again


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let ``load_state_dict`` take whole tensors."""
    for name, parameter in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if name in state_dict:
            state_dict[name] = parted_like(state_dict[name], parameter)


def _refuse(is_there: bool, what: str) -> None:
    if is_there:
        raise UserError(f"strategy=fsdp has no {what}. Leave it out, or use strategy=ddp.")
