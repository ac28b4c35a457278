"""One checkpoint of a run: whether it is plain, and converts."""

import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from harness.checkpoints.reading import read
from harness.checkpoints.stand_in import StandIn, type_name
from harness.convert.conversion import convert
from harness.convert.tensors import CheckpointError
from harness.errors import UserError
from harness.prove.verdicts import BROKEN, HOLDS, SKIPPED, Verdict

PLAIN = (int, float, str, bytes, bool, complex, type(None), torch.Tensor, torch.dtype, torch.Size)
PARAMETER = re.compile(r"checkpoint\['(?:datamodule_)?hyper_parameters'\]\['(\w+)'\]")


class CheckpointFile:
    """The best checkpoint of a run, or else its last.

    Args:
        run_dir: the run's folder.
        folder: for the plain file.
        packages: whose networks may be built, to hold the plain file against them.
    """

    def __init__(self, run_dir: Path, folder: Path, packages: Collection[str]) -> None:
        names = (run_dir / "checkpoints" / name for name in ("best.ckpt", "last.ckpt"))
        self.path = next((path for path in names if path.is_file()), None)
        self.output, self.packages, self.error = folder / "weights.pt", packages, ""

    @cached_property
    def plain(self) -> dict[str, str]:
        """The plain file that is made of it, and what its names lack; empty where that fails."""
        if self.path is None:
            return {}
        try:
            report = convert(self.path, self.output, packages=self.packages, force=True)
        except (UserError, CheckpointError, OSError) as error:
            self.error = str(error)
            return {}
        new, entry = next(iter(report.tensors.items()))
        prefix = entry.source.removesuffix(new)
        return {"checkpoint": str(self.path), "plain": str(self.output), "prefix": prefix}

    def loads(self) -> Verdict:
        """Whether ``torch.load(weights_only=True)`` takes it."""
        name = "weights_only"
        if self.path is None:
            return Verdict(name, SKIPPED, "the run has written no checkpoint")
        try:
            torch.load(self.path, weights_only=True)
        except Exception as error:  # whatever torch makes of what it refuses
            found = odd_values(read(self.path))
            where, _, kind = found[0].partition(" ") if found else ("checkpoint[...]", "", "")
            why = f"likely: {where} {kind} is neither a number, a text nor a tensor"
            line = f"{where} = float(...)  # or torch.as_tensor(...), in on_save_checkpoint"
            if parameter := PARAMETER.match(where):
                line = f'self.save_hyperparameters(ignore=["{parameter[1]}"])'
            said = f"torch.load refuses it: {str(error).strip().partition('. ')[0][:200]}"
            return Verdict(name, BROKEN, said, why, line)
        return Verdict(name, HOLDS, f"torch.load({self.path.name}, weights_only=True)")

    def converts(self, probe: dict[str, Any]) -> Verdict:
        """Whether the plain file gives what the module gives, as a look into its step has found."""
        name, answer = "convert", probe.get("plain", {})
        if self.path is None:
            return Verdict(name, SKIPPED, "the run has written no checkpoint")
        if not self.plain:
            return Verdict(name, BROKEN, self.error)
        network = answer.get("network", self.plain["prefix"] or "the whole module")
        if "equal" not in answer:
            said = f"{network} is converted; its outputs could not be compared"
            return Verdict(name, SKIPPED, said, answer.get("error", ""))
        if not answer["equal"]:
            return Verdict(name, BROKEN, f"{network} gives other outputs with the plain file")
        outputs = "and outputs " if answer["num_calls"] else ""
        return Verdict(name, HOLDS, f"weights {outputs}of {network} equal by bit")


def odd_values(tree: Any, path: str = "checkpoint") -> list[str]:
    """Where a checkpoint holds what is not plain."""
    if isinstance(tree, dict):
        return [x for key, value in tree.items() for x in odd_values(value, f"{path}[{key!r}]")]
    if isinstance(tree, (list, tuple, set)):
        return [x for i, value in enumerate(tree) for x in odd_values(value, f"{path}[{i}]")]
    kind = type_name(tree) if isinstance(tree, StandIn) else type(tree).__name__
    return [] if type(tree) in PLAIN else [f"{path} ({kind})"]
