from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


def _nothing() -> None:
    return None


class WatchedLoader(DataLoader[Any]):
    """A ``DataLoader`` that tells when a batch is asked for, and when it is there.

    ``when_asked`` and ``when_there`` are called around each batch; who watches sets them, also
    while the loader is running.
    """

    when_asked: Callable[[], object] = staticmethod(_nothing)
    when_there: Callable[[], object] = staticmethod(_nothing)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Not a generator itself: workers start when the iterator is made, as they do without this.
        return self._tell(super().__iter__())

    def _tell(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.when_asked()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.when_there()
            yield batch
