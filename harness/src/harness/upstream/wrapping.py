"""Wraps a model in DDP anew while it trains, for what is frozen and unfrozen then.

Lightning wraps once, before training. DDP averages the gradients of what was trainable at that
moment: a layer that is unfrozen later would be trained by each process for itself, and one that is
frozen later waited for. torch has no way to tell it. Seen in Lightning 2.6 and torch 2.6 to 2.13.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn

PRIVATE = {"pytorch_lightning.strategies:DDPStrategy()": "_ddp_kwargs _pl_static_graph_delay_done"}


def call_after(strategy: DDPStrategy, method: str, function: Callable[..., None]) -> None:
    """Call a function, with the method's arguments, whenever the strategy has run that method."""
    original = getattr(strategy, method)

    def called(*args: Any) -> None:
        original(*args)
        function(*args)

    vars(strategy)[method] = called


def call_no_more(strategy: DDPStrategy) -> None:
    """Undo it for both methods that are looked at."""
    for name in ("configure_ddp", "on_train_batch_start"):
        vars(strategy).pop(name, None)


def wrap_anew(strategy: DDPStrategy, expected: Iterable[nn.Parameter]) -> None:
    """Let DDP average the gradients of these parameters; all processes call it.

    No value is changed: what differs between the processes is not made equal here.
    """
    before: Any = strategy.model
    # Its hooks on the parameters end with it.
    before.reducer = before.logger = None
    strategy.model = before.module
    frozen = [parameter for parameter in expected if not parameter.requires_grad]
    settings, device = strategy._ddp_kwargs, strategy.root_device
    if device.type == "cuda":  # it is built on another stream, and takes over gradients there
        torch.cuda.synchronize(device)
    strategy._ddp_kwargs = settings | {"init_sync": False}
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        strategy.configure_ddp()
    finally:
        strategy._ddp_kwargs = settings
        for parameter in frozen:
            parameter.requires_grad_(False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    strategy._pl_static_graph_delay_done = False
