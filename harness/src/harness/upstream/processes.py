"""Leave it to the harness to start, watch and stop the processes of a run and its data workers.

On SIGTERM Lightning's handler waits in a broadcast for processes that got no signal: two processes
under ddp hung in 7 of 9 trials. Its observer looks every five seconds and kills the first process
without naming the rank that ended, also where all processes leave as agreed. Launchers have no
public class. Seen in Lightning 2.6.

A data worker's queue sends in a thread. An error there, such as shared memory without room, Python
3.11 prints and drops, and the process would wait for that batch without end.

What intercepts operations, such as a collective in an evaluation's step, is private in torch.
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
    """Let the Trainer install no handlers; call it before training, in each process.

    Nor does each step then ask the first process, and wait, whether it got a SIGTERM.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def replace_process_observer(start: Callable[[Processes], None]) -> None:
    """Let Lightning call ``start`` with the processes of the later ranks, and no observer."""
    subprocess_script._launch_process_observer = start  # type: ignore[assignment,attr-defined]


def replace_starter(start: Callable[..., subprocess.Popen[Any]]) -> None:
    """Let Lightning call ``start`` instead of ``subprocess.Popen`` for each of the later ranks."""
    subprocess_script.subprocess = SimpleNamespace(Popen=start)  # type: ignore[assignment,attr-defined]


def end_where_nothing_is_sent(end: Callable[[int], Any]) -> None:
    """Let this data worker end with its first such error: torch notices that, and names it.

    Args:
        end: ends the process, from whichever thread, with a status.
    """

    def show_and_end(error: BaseException, batch: Any) -> None:
        if "No space left" not in str(error):  # else the worker's process says what to do
            traceback.print_exception(error)
            sys.stderr.flush()
        end(1)

    queues.Queue._on_queue_feeder_error = staticmethod(show_and_end)  # type: ignore[attr-defined]


def has_communication_hook(trainer: pl.Trainer) -> bool:
    """Return whether the strategy averages gradients by a hook of DDP."""
    return getattr(trainer.strategy, "_ddp_comm_hook", None) is not None


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Call a function before each collective of ``torch.distributed``, whoever begins it."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refuse = refuse

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operation, then run it."""
        if func.namespace.strip("_").startswith("c10d"):
            self.refuse()
        return func(*args, **(kwargs or {}))
