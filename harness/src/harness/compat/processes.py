"""Replace how Lightning starts, watches and stops processes; watch workers and collectives.

Seen in Lightning 2.6, whose launchers have no public class:

- On SIGTERM, Lightning's handler broadcasts to all ranks, and hangs if some ranks got no signal.
  Two processes under ddp hung in 7 of 9 trials.
- Lightning's observer polls the other ranks every five seconds. If one has ended with a status
  other than 0, the observer kills all ranks of this machine. It does so even if all ranks end
  together after a signal.

The queue of a data worker sends batches in a thread. After an error in this thread, such as full
shared memory, Python 3.11 prints the error and drops the batch. The training process would then
wait for the batch forever.

``BeforeCollectives`` sees each collective before it starts, by ``TorchDispatchMode``, which is
private.
"""

import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import queues
from types import SimpleNamespace
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies.launchers import subprocess_script
from torch.utils._python_dispatch import TorchDispatchMode

Processes = list[subprocess.Popen[Any]]


def keep_lightning_from_signals(trainer: pl.Trainer) -> None:
    """Keep the Trainer from installing signal handlers. Call it before training on every rank.

    A step also no longer broadcasts whether rank 0 got a SIGTERM.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def replace_process_observer(start: Callable[[Processes], None]) -> None:
    """Let Lightning call ``start`` with the processes it has started, instead of its observer."""
    subprocess_script._launch_process_observer = start  # type: ignore[assignment,attr-defined]


def replace_starter(start: Callable[..., subprocess.Popen[Any]]) -> None:
    """Let Lightning call ``start`` instead of ``subprocess.Popen`` for each process it starts."""
    subprocess_script.subprocess = SimpleNamespace(Popen=start)  # type: ignore[assignment,attr-defined]


def end_where_nothing_is_sent(end: Callable[[int], Any]) -> None:
    """End this data worker when it cannot send a batch. torch then reports the worker.

    Args:
        end: a function that ends the process with a status, in any thread.
    """

    def show_and_end(error: BaseException, batch: Any) -> None:
        if "No space left" not in str(error):  # the training process prints a hint for this error
            traceback.print_exception(error)
            sys.stderr.flush()
        end(1)

    queues.Queue._on_queue_feeder_error = staticmethod(show_and_end)  # type: ignore[attr-defined]


def has_communication_hook(trainer: pl.Trainer) -> bool:
    """Return whether the strategy averages gradients by a communication hook of DDP."""
    return getattr(trainer.strategy, "_ddp_comm_hook", None) is not None


class BeforeCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Call a function before each collective, of the user's code and of libraries.

    ``WatchedOperations`` does the same in a parity check, and more.
    """

    def __init__(self, before_collective: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before_collective = before_collective

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; before a collective call ``before_collective``."""
        if func.namespace.strip("_").startswith("c10d"):
            self.before_collective()
        return func(*args, **(kwargs or {}))
