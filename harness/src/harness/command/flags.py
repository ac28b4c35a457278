"""The command's flags: what shows something and runs nothing, and where config files are."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import hydra

from harness import allowed
from harness.command.compose import as_hydra_reads, explained, with_training_config
from harness.command.hydra_calls import hydra_compose
from harness.command.yaml_files import check_experiments
from harness.errors import UserError

MULTIRUN = ("-m", "--multirun", "hydra.mode=MULTIRUN")
COMPLETION = ("-sc", "--shell-completion")
SHOWING = ("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", *COMPLETION)
PLACES = ("-cd", "--config-dir", "-cn", "--config-name", "-cp", "--config-path")
OF_SHOWING = ("-p", "--package", "--resolve")


def checked(arguments: Sequence[str]) -> list[str]:
    """Refuse those of Hydra's flags that ask for another config or job than the command's.

    Raises:
        UserError: with what to type instead.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in PLACES:
            raise UserError(
                f"{flag}: a command has its own config. Choose settings with experiment=<name>; "
                "hydra.searchpath=[file://<folder>] adds a folder of config files."
            )
        if flag.startswith("-") and flag not in (*SHOWING, *OF_SHOWING, *MULTIRUN):
            raise UserError(f"There is no flag {flag} here. --help, --cfg job and -m are some.")
    return list(arguments)


def let_hydra_answer(task: str, conf: Path, words: list[str]) -> NoReturn:
    """``--help``, ``--cfg``, ``--info`` and completion.

    Args:
        task: one of the three.
        conf: the folder of the config files.
        words: flags and settings.
    """
    words = as_hydra_reads(task, words)
    if task != "train":
        words = with_training_config(words)
    sys.argv[1:] = words
    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    if not flags & {*SHOWING}:
        raise UserError(f"{' '.join(flags)} has no use without --cfg job.")
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    with explained(task, words, conf), hydra_raises():
        if not flags & {*COMPLETION}:
            allowed.follow(conf)
            check_experiments(task, words, conf)
            allowed.check_hydra(hydra_compose(task, settings, conf, with_hydra=True).hydra)
        hydra.main(config_path=str(conf), config_name=task, version_base="1.3")(lambda cfg: None)()
    sys.exit(0)


@contextmanager
def hydra_raises() -> Iterator[None]:
    """Let Hydra raise its errors; by default it prints them and exits."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before
