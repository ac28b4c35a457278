"""Lets a loader that was made with positional arguments be predicted on.

To follow the samples' places Lightning makes each loader of a prediction anew, from the arguments
that it has recorded. It adds ``batch_size`` by its name, so ``DataLoader(data, 32)`` in a module
would get it twice and be refused. Seen in Lightning 2.6.
"""

from collections.abc import Mapping
from typing import Any

from lightning_fabric.utilities.data import _replace_dunder_methods
from torch.utils.data import DataLoader

PRIVATE = {
    "lightning_fabric.utilities.data": "_replace_dunder_methods",
    "harness.upstream.prediction_loaders:example()": (
        "__pl_saved_args __pl_saved_arg_names __pl_saved_kwargs"
    ),
}


def with_named_arguments(loaders: Any) -> Any:
    """The same loaders, also in a list or a dict, with no argument recorded by its place."""
    if isinstance(loaders, Mapping):
        parts = list(loaders.values())
    else:
        parts = list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
    if parts != [loaders]:
        for part in parts:
            with_named_arguments(part)
    elif type(loaders) is DataLoader and hasattr(loaders, "__pl_saved_args"):
        known = vars(loaders)  # not setattr, which Lightning records as well
        arguments = dict(zip(known["__pl_saved_arg_names"], known["__pl_saved_args"], strict=False))
        known["__pl_saved_kwargs"] = arguments | known["__pl_saved_kwargs"]
        known["__pl_saved_args"], known["__pl_saved_arg_names"] = (), ()
    return loaders


def example() -> Any:
    """A loader whose arguments Lightning has recorded."""
    with _replace_dunder_methods(DataLoader, "dataset"):
        return DataLoader([0], 1)  # type: ignore[arg-type]  # a list is a data set
