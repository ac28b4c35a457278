"""Data that comes in an order of its own: iterable data sets, and loaders that iterate themselves.

Nobody can give a process its share of such data but the stream itself. The contract:

- *Parts.* A stream has ``read_part(part, num_parts)``, which is called in whichever process or
  worker reads it, before it is iterated; or it splits itself by ``torch.distributed`` and
  ``get_worker_info``, as the streams of webdataset and litdata do. Where processes or workers
  begin with the same batch, neither holds, and the run is refused.
- *Randomness* comes from ``random``, ``numpy.random`` or ``torch``, which are seeded by
  (seed, epoch).
- *State.* Where the loader, or a data set that is read without workers, has ``state_dict`` and
  ``load_state_dict``, a run goes on from there; else it reads again what it has seen of the epoch,
  and drops it.
- *Uneven ends.* A process whose part has ended repeats its last batch with weight 0 until the
  others have ended as well.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.utilities.data import extract_batch_size

from harness.data.loading import Watched
from harness.data.randomness import (
    END,
    generator_states,
    kept_generators,
    mix,
    restore_generators,
    seed_generators,
)
from harness.data.stream_parts import SeededStream, fingerprint
from harness.errors import UserError

log = logging.getLogger(__name__)

# Batches from one state that is kept to the next; what follows it is read again and dropped.
SNAPSHOT_EVERY = 50


class SharedStream:
    """Let processes read a stream together: nobody waits, nothing is lost, no part is read twice.

    Args:
        loader: iterates by itself.
        name: what a message calls it.
        num_ranks: processes that read it.
        seed: with the epoch, decides what is drawn at random.
        batch_size: samples per step over all processes, where it is known.
        is_counted: each item is what ``Counting`` gives.
    """

    before_move: Callable[[], object] = staticmethod(lambda: None)  # of a batch to its device

    def __init__(
        self,
        loader: Any,
        name: str,
        *,
        num_ranks: int,
        seed: int,
        batch_size: int | None = None,
        is_counted: bool = False,
    ) -> None:
        self.loader, self.name, self.num_ranks, self.seed = loader, name, num_ranks, seed
        self.batch_size = batch_size
        self.is_counted = is_counted
        self.epoch = 0
        self.start = (0, 0)
        self.loaded: tuple[int, Any] | None = None
        self.expected: int | None = None  # of the run that goes on: what comes first
        self.sampler = self.batch_sampler = self  # where Lightning announces the epoch
        self.group: Any = None
        self._begin()

    def _begin(self) -> None:
        self.running = self.epoch
        self.uneven: dict[int, float] = {}  # weights other than 1, by batch
        self.snapshots: list[tuple[int, Any]] = []  # batches that were read, and the state then
        # Checksums of batches by number: some are read ahead.
        self.recent = deque[tuple[int, int]](maxlen=3)
        self.sizes = deque[tuple[int, int]](
            maxlen=3
        )  # of batches by number, where they are counted

    def __len__(self) -> int:
        if self.num_ranks > 1:
            raise TypeError("parts of a stream differ in length")
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """What a module looks up at its loader."""
        if name in ("loader", "dataset", "state_dict", "load_state_dict"):  # saved per process
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next ``iter``."""
        self.epoch = epoch

    def settings(self) -> dict[str, Any]:
        """Return what the batches depend on: a run that goes on must have the same."""
        return {"stream": self.name, "batch_size": self.batch_size, "seed": self.seed}

    def weight(self, batch_idx: int) -> float:
        """Factor of this batch's gradient, as that of ``SharedBatchSampler``."""
        return self.uneven.get(batch_idx, 1.0)

    def is_filler(self, batch_idx: int) -> bool:
        """Whether this process's part has ended, and its last batch is repeated."""
        return self.weight(batch_idx) == 0

    def num_samples_in(self, batch_idx: int) -> int | None:
        """Samples in this process's batch; ``None`` where nobody counts."""
        return dict(self.sizes).get(batch_idx)

    def has_ended(self, batch_idx: int) -> bool:
        """Whether it gives nothing any more; a stream does not begin again beside a longer one."""
        return False

    def start_at(self, epoch: int, step: int) -> None:
        """Let ``epoch`` begin at a step."""
        # Lightning asks for the first batches before it announces the epoch.
        self.start, self.epoch = (epoch, step), epoch

    def state(self, epoch: int, num_batches: int) -> dict[str, Any]:
        """What this process needs to go on behind so many batches of an epoch."""
        if epoch != self.running:  # it has not begun
            return {"num_ranks": self.num_ranks, "snapshot": None, "comes": None}
        known = [snapshot for snapshot in self.snapshots if snapshot[0] <= num_batches]
        return {
            "num_ranks": self.num_ranks,
            "snapshot": known[-1] if known else None,
            "comes": dict(self.recent).get(num_batches),  # a checksum of the next batch
        }

    def load(self, states: list[dict[str, Any]], rank: int) -> None:
        """Take what the processes of the run that goes on have kept.

        Raises:
            UserError: if their parts would be others now.
        """
        before = states[0]["num_ranks"]
        if before != self.num_ranks and self.start[1]:
            raise UserError(
                f"{self.name} was read by {before} processes when the run was stopped inside of an "
                f"epoch, and now by {self.num_ranks}: their parts would be others.\n"
                f"Go on with {before} processes."
            )
        if before == self.num_ranks:
            self.loaded, self.expected = states[rank]["snapshot"], states[rank]["comes"]

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        first = self.start[1] if self.epoch == self.start[0] else 0
        items, begin = self._items(first)
        last: Any = END
        prints: list[int] = []
        for k in count(begin):
            item = next(items)
            if k < first:
                if item is END:
                    raise UserError(
                        f"{self.name} ended after {k} batches, and the run was stopped behind "
                        f"{first}: the data have changed.\nUse the data that the run began with."
                    )
                continue
            is_first = k - begin < max(1, getattr(self.loader, "num_workers", 0))
            num_samples, begins, batch = self._counted(item, is_first)
            sizes, all_begin = self._gather(num_samples, begins)
            if not any(sizes):
                self.before_move()  # of the last batch, which was read ahead
                return
            self._check_parts([b for b in all_begin if b], prints)
            if item is END and last is END:
                raise UserError(f"{self.name} has no batch for one of {self.num_ranks} processes.")
            last = last if item is END else batch
            if self.is_counted:
                size = num_samples if item is not END else self.sizes[-1][1]
                self.sizes.append((k, size))
            # Now, as a batch may be changed in place while it is moved to its device.
            self.recent.append((k, fingerprint(last)))
            if self.expected not in (None, self.recent[-1][1]):
                log.warning(
                    "%s gives other batches than before the run was stopped: samples of this epoch "
                    "may be seen twice or not at all. It must depend on set_epoch, on its state, "
                    "and on torch's, NumPy's or Python's generator.",
                    self.name,
                )
            self.expected = None
            weight = num_samples * self.num_ranks / sum(sizes)
            if weight != 1:
                self.uneven[k] = weight
            self.before_move()
            yield last

    def _items(self, first: int) -> tuple[Iterator[Any], int]:
        """What the loader gives, then ``END`` for ever; and the number of the first item."""
        holder = self._holder_of_state()
        snapshot, self.loaded = (self.loaded if first else None), None
        begin = 0
        dataset = getattr(self.loader, "dataset", None)
        if isinstance(dataset, SeededStream):
            dataset.epoch, dataset.goes_on = self.epoch, False
        if callable(announce := getattr(dataset, "set_epoch", None)):
            announce(self.epoch)
        if hasattr(self.loader, "current_epoch"):  # litdata's counts its own epochs
            self.loader.current_epoch = self.epoch
        if snapshot and snapshot[0] <= first and holder is not None:
            begin = snapshot[0]
            holder.load_state_dict(snapshot[1])
            if isinstance(dataset, SeededStream):
                dataset.goes_on = True
        return self._seeded(holder, begin), begin

    def _seeded(self, holder: Any, begin: int) -> Iterator[Any]:
        """Iterate with generators of its own, which are seeded anew at every snapshot."""
        iterator: Any = None
        own: Any = None
        for k in count(begin):
            with kept_generators():
                if iterator is None or k % SNAPSHOT_EVERY == 0:
                    seed_generators(mix(self.seed, self.epoch, k))
                    if holder is not None and iterator is not None:
                        state = copy.deepcopy(holder.state_dict())
                        self.snapshots = [*self.snapshots[-1:], (k, state)]
                else:
                    restore_generators(own)
                iterator = iter(self.loader) if iterator is None else iterator
                item = next(iterator, END)
                own = generator_states()
            while item is END:
                yield END
            yield item

    def _holder_of_state(self) -> Any:
        """The object whose state leads to the stream's position, where there is one."""
        holder = self.loader
        if isinstance(holder, Watched):  # plain, and its workers have copies of the stream
            holder = holder.dataset if holder.num_workers == 0 else None
        return (
            holder if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict") else None
        )

    def _counted(self, item: Any, is_first: bool) -> tuple[int, int, Any]:
        """The number of samples, a checksum of how a part begins or 0, and the batch."""
        if item is END:
            return 0, 0, END
        if self.is_counted:
            return item  # type: ignore[no-any-return]
        begins = fingerprint(item) if is_first else 0
        try:
            return max(1, extract_batch_size(item)), begins, item  # 0 would be the end
        except Exception:  # nothing in it is a tensor
            return 1, begins, item

    def _gather(self, num_samples: int, fingerprint: int) -> tuple[list[int], list[int]]:
        if self.num_ranks == 1:
            return [num_samples], [fingerprint]
        if self.group is None:
            self.group = dist.new_group(backend="gloo")
        mine = torch.tensor([num_samples, fingerprint])
        values = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(values, mine, self.group)
        sizes, fingerprints = torch.stack(values).T.tolist()
        return sizes, fingerprints

    def _check_parts(self, begin: list[int], before: list[int]) -> None:
        """Refuse a stream that gives the same to all: each sample would count several times."""
        is_shared = len(set(begin)) == len(begin)
        if is_shared and not set(begin) & set(before):
            before += begin
            return
        who = "worker" if is_shared else "process"
        said = f"{self.name} gives every {who} the same samples."
        if not isinstance(self.loader, Watched):  # nobody else knows how it reads
            raise UserError(
                f"{said}\nLet it give each process a part by torch.distributed.get_rank(), use a "
                "plain DataLoader, or use one process."
            )
        raise UserError(
            f"{said} Let the data set read its part:\n"
            "    def read_part(self, part, num_parts):  # called in each process and worker\n"
            "        self.files = self.files[part::num_parts]\n"
            "and take out a split of its own by get_worker_info or rank, "
            + ("or use num_workers=1." if is_shared else "or use one process.")
        )
