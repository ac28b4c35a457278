"""Starts ``train.py`` and ``torchrun`` without their imports, as tests/faults does.

A process that has imported everything is forked; a torchrun that was started so forks its workers.
"""

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.conftest import ROOT
from tests.faults.fast_command import Forked, be, run_command

FAST = ("train.py", "torchrun")


def is_fast(command: list[str]) -> bool:
    """Whether a command can be forked."""
    return command[0] in FAST


def fork(
    command: list[str], environment: dict[str, str], log: Path, enter: Callable[[], None]
) -> Forked:
    """Start a command; ``enter`` is called before it begins."""

    def become() -> NoReturn:
        os.chdir(ROOT)
        enter()
        os.environ.clear()
        os.environ.update(environment)
        if command[0] == "train.py":
            run_command(command, environment)
        be_torchrun(command[1:])

    return Forked(become, log)


def be_torchrun(arguments: list[str]) -> NoReturn:
    """Be torchrun, and end; its workers are forked."""

    def popen(self: Any, words: tuple[str, ...], env: dict[str, str]) -> Any:
        if "train.py" not in words:
            return subprocess.Popen(words, env=env, start_new_session=True)
        program = list(words[words.index("train.py") :])
        return Forked(partial(run_command, program, env))

    subprocess_handler.SubprocessHandler._popen = popen  # type: ignore[assignment,method-assign]
    be(partial(torchrun.main, arguments))
