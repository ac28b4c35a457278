"""Counts the bytes of all tensors that are alive, as a device's allocator would."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of storages that operations have made since it was entered, and their peak.

    A storage counts until nothing refers to it, whether or not garbage is collected: what hangs in
    a cycle counts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.num_counted = 0
        self.known: set[int] = set()
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not self.is_paused:
                self.count(leaf.untyped_storage())
        return result

    def count(self, storage: Any) -> None:
        """Count a storage, once, until it is freed."""
        key = id(storage)  # torch keeps one Python object for each storage that has one
        if key not in self.known:
            self.known.add(key)
            size = storage.nbytes()
            self.now += size
            self.num_counted += 1
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, key, size)

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def restart_peak(self) -> int:
        """Return the peak so far, and measure from now on."""
        peak, self.peak = self.peak, self.now
        return peak
