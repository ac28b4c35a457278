"""Data that comes in an order of its own: iterable data sets, and loaders that iterate themselves.

Nobody can give a process its share of such data but the stream itself. The contract:

- *Parts.* A stream has ``read_part(part, num_parts)``, which is called in whichever process or
  worker reads it, before it is iterated; or it splits itself by ``torch.distributed`` and
  ``get_worker_info``, as the streams of webdataset and litdata do, but not both. Where processes or
  workers begin with the same samples, neither holds, and the run is refused.
- *Randomness* comes from ``random``, ``numpy.random`` or ``torch``, which are seeded by
  (seed, epoch).
- *Resume.* A run that goes on reads again what it has seen of the epoch, and drops it.
- *Uneven ends.* A process whose part has ended repeats its last batch with weight 0 until the
  others have ended as well.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pytorch_lightning.utilities.data import extract_batch_size

from harness.data.randomness import END, mix, seeded_iteration
from harness.data.stream_parts import SeededStream, fingerprint
from harness.errors import UserError

log = logging.getLogger(__name__)

NUM_NOTED = 4  # batches that may be read ahead of the running one


class Noted(NamedTuple):
    """What is known of a batch until its step has run."""

    num_samples: int | None
    weight: float
    checksum: int


class SharedStream:
    """Let processes read a stream together: nobody waits, nothing is lost, no part is read twice.

    Args:
        loader: iterates by itself.
        name: what a message calls it.
        num_ranks: processes that read it.
        seed: with the epoch, decides what is drawn at random.
        batch_size: samples per step over all processes, where it is known; each item is then what
            ``Counting`` gives.
    """

    before_move: Callable[[], object] = staticmethod(lambda: None)  # of a batch to its device

    def __init__(
        self, loader: Any, name: str, *, num_ranks: int, seed: int, batch_size: int | None = None
    ) -> None:
        self.loader, self.name, self.num_ranks = loader, name, num_ranks
        self.seed, self.batch_size = seed, batch_size
        self.epoch = self.running = 0
        self.start = (0, 0)  # the epoch and batch at which a run goes on
        self.expected: int | None = None  # a checksum of the batch at which a run goes on
        self.noted: dict[int, Noted] = {}  # by number of the batch
        self.sampler = self.batch_sampler = self  # where Lightning announces the epoch
        self.group: Any = None

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

    def start_at(self, epoch: int, step: int) -> None:
        """Let ``epoch`` begin at a step."""
        # Lightning asks for the first batches before it announces the epoch.
        self.start, self.epoch = (epoch, step), epoch

    def settings(self) -> dict[str, Any]:
        """Return what the batches depend on: a run that goes on must have the same."""
        return {"stream": self.name, "batch_size": self.batch_size, "seed": self.seed}

    def weight(self, batch_idx: int) -> float:
        """Factor of this batch's gradient, as that of ``SharedBatchSampler``."""
        return self.noted[batch_idx].weight if batch_idx in self.noted else 1.0

    def is_filler(self, batch_idx: int) -> bool:
        """Whether this process's part has ended, and its last batch is repeated."""
        return self.weight(batch_idx) == 0

    def num_samples_in(self, batch_idx: int) -> int | None:
        """Samples in this process's batch; ``None`` where nobody counts."""
        return self.noted[batch_idx].num_samples if batch_idx in self.noted else None

    def has_ended(self, batch_idx: int) -> bool:
        """Whether it gives nothing any more; a stream ends for all loaders beside it."""
        return False

    def state(self, epoch: int, num_batches: int) -> dict[str, int | None]:
        """What tells whether this process goes on with the right batch of an epoch."""
        comes = self.noted.get(num_batches) if epoch == self.running else None
        return {"num_ranks": self.num_ranks, "comes": comes.checksum if comes else None}

    def load(self, states: list[dict[str, Any]], rank: int) -> None:
        """Take what the processes of the run that goes on have kept.

        Raises:
            UserError: if their parts would be others now.
        """
        before = states[0]["num_ranks"]
        if before == self.num_ranks:
            self.expected = states[rank]["comes"]
        elif self.start[1]:
            raise UserError(
                f"{self.name} was read by {before} processes when the run was stopped inside of an "
                f"epoch, and now by {self.num_ranks}: their parts would be others.\n"
                f"Go on with {before} processes."
            )

    def __iter__(self) -> Iterator[Any]:
        self.running, self.noted = self.epoch, {}
        first = self.start[1] if self.epoch == self.start[0] else 0
        self._announce_epoch()
        items = seeded_iteration(self.loader, mix(self.seed, self.epoch))
        batch: Any = END
        num_samples: int | None = None
        beginnings: set[int] = set()  # of all parts
        for k, item in enumerate(chain(items, repeat(END))):
            if k < first:
                if item is END:
                    raise UserError(
                        f"{self.name} ended after {k} batches, and the run was stopped behind "
                        f"{first}: the data have changed.\nUse the data that the run began with."
                    )
                continue
            num_read, begins, read = self._counted(item, k)
            sizes, all_begin = self._gather(num_read, begins)
            if not any(sizes):
                self.before_move()  # of the last batch, which was read ahead
                return
            self._check_parts([one for one in all_begin if one], beginnings)
            if read is not END:
                num_samples, batch = num_read if self.batch_size else None, read
            if batch is END:
                raise UserError(f"{self.name} has no batch for one of {self.num_ranks} processes.")
            # The checksum is taken now, as a batch may be changed in place while it is moved.
            weight = num_read * self.num_ranks / sum(sizes)
            self.noted[k] = Noted(num_samples, weight, fingerprint(batch))
            self.noted.pop(k - NUM_NOTED, None)
            if self.expected not in (None, self.noted[k].checksum):
                log.warning(
                    "%s gives other batches than before the run was stopped: samples of this epoch "
                    "may be seen twice or not at all. It must depend on set_epoch, on its state, "
                    "and on torch's, NumPy's or Python's generator.",
                    self.name,
                )
            self.expected = None
            self.before_move()
            yield batch

    def _announce_epoch(self) -> None:
        dataset = getattr(self.loader, "dataset", None)
        if isinstance(dataset, SeededStream):
            dataset.epoch = self.epoch
        if callable(announce := getattr(dataset, "set_epoch", None)):
            announce(self.epoch)
        if hasattr(self.loader, "current_epoch"):  # litdata's counts its own epochs
            self.loader.current_epoch = self.epoch

    def _counted(self, item: Any, number: int) -> tuple[int, int, Any]:
        """The number of samples, a checksum of how a part begins or 0, and the batch."""
        if item is END:
            return 0, 0, END
        if self.batch_size:
            return item  # type: ignore[no-any-return]
        is_first = number < max(1, getattr(self.loader, "num_workers", 0))
        begins = fingerprint(item) if is_first else 0
        try:
            return max(1, extract_batch_size(item)), begins, item  # 0 would be the end
        except Exception:  # nothing in it is a tensor
            return 1, begins, item

    def _gather(self, *numbers: int) -> list[list[int]]:
        """Each number of all processes, by rank."""
        if self.num_ranks == 1:
            return [[number] for number in numbers]
        self.group = self.group or dist.new_group(backend="gloo")
        mine = torch.tensor(numbers)
        values = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(values, mine, self.group)
        by_number: list[list[int]] = torch.stack(values).T.tolist()
        return by_number

    def _check_parts(self, begin: list[int], before: set[int]) -> None:
        """Refuse a stream that gives the same to all: each sample would count several times."""
        num_expected = len(before) + len(begin)
        before.update(begin)
        if len(before) < num_expected:
            raise UserError(
                f"{self.name} gives every process or worker the same samples.\n"
                "Let its data set read its part,\n"
                "    def read_part(self, part, num_parts):  # called in each process and worker\n"
                "        self.files = self.files[part::num_parts]\n"
                "without a split of its own by get_worker_info or rank; let a loader that is no "
                "DataLoader split by torch.distributed.get_rank(); or use one process and "
                "num_workers=0."
            )
