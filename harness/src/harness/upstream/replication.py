"""What dp and ddp2 read of a torch module and of a Lightning strategy.

``_parameters`` and ``_buffers`` have been the same since torch 0.4, and replicas cannot be made
without them: the public ``parameters()`` takes six times as long, for every module in every step.
Nothing public tells that a module was compiled, or that ``trainer.sync_batchnorm`` was asked for;
without that dp would use one device, or train with other statistics than was asked for. Seen in
torch 2.6 to 2.13 and Lightning 2.6.
"""

from pytorch_lightning.strategies import ParallelStrategy
from torch import Tensor, nn

PRIVATE = {
    "torch.nn:Module()": "_parameters _buffers _compiled_call_impl",
    "pytorch_lightning:LightningModule()": "_compiler_ctx",
    "pytorch_lightning.strategies:DDPStrategy()": "_layer_sync",
}


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module, without those of its submodules."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` or ``torch.compile(LightningModule)`` hides its calls."""
    return bool(module._compiled_call_impl or getattr(module, "_compiler_ctx", None))


def synchronises_batch_norm(strategy: ParallelStrategy) -> bool:
    """Whether the Trainer was built with ``sync_batchnorm``."""
    return strategy._layer_sync is not None
