"""Whether the plain weights of a checkpoint give the outputs that the module gives."""

from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from harness.checkpoints.reading import read
from harness.prove.recording import walk


def same_outputs(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    steps: Any,
    checkpoint: str,
    plain: str,
    prefix: str,
) -> dict[str, Any]:
    """Run a step with a checkpoint's weights, and its network again with the plain file's.

    Returns:
        ``network``: its name in the module; ``equal``: whether all weights and outputs are;
        ``num_calls``: of the network, by the step.
    """
    module.load_state_dict(read(checkpoint)["state_dict"])
    network: nn.Module = module.get_submodule(prefix.rstrip("."))
    calls: list[tuple[Any, Any, Any]] = []

    def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((_copied(args), _copied(kwargs), _copied(output)))

    network.eval()
    hook = network.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        if steps.is_known and module.automatic_optimization:
            module.eval()
            steps.run(steps.read(steps.indices))
        hook.remove()
        want = {
            name: value.clone()
            for name, value in network.state_dict().items()
            if isinstance(value, Tensor)
        }
        for tensor in want:  # no weight may stay behind; other buffers are its constructor's
            network.state_dict()[tensor].fill_(1)
        network.load_state_dict(torch.load(plain, weights_only=True))
        network.eval()
        found = network.state_dict()
        is_equal = all(torch.equal(value, found[name]) for name, value in want.items())
        for args, kwargs, output in calls[:1]:
            made = network(*args, **kwargs)
            pairs = zip(walk(output), walk(made), strict=True)
            is_equal &= all(
                torch.equal(one, two) for (_, one), (_, two) in pairs if isinstance(one, Tensor)
            )
    name = f"self.{prefix.rstrip('.')}" if prefix else type(module).__name__
    return {"network": name, "equal": is_equal, "num_calls": len(calls)}


def _copied(tree: Any) -> Any:
    return apply_to_collection(tree, Tensor, lambda tensor: tensor.detach().clone())
