from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.command import validate
from harness.command.compose import compose_command


def composed(overrides: list[str], conf: str | Path = "conf") -> Any:
    """The checked config of a training command.

    Raises:
        UserError: with what to type instead.
    """
    command = compose_command("train", overrides, conf)
    validate.check(command)
    return OmegaConf.create(OmegaConf.to_container(command.cfg, resolve=True))
