"""A picture shows every sample once, and never costs a run its result."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from harness.monitoring.picture import Picture
from tests.conftest import train_command

FAULTS = ("none", "reset", "update", "kept", "pickle", "draw")


class Sizes(Picture):
    """Keeps the size of each batch, and draws into a file.

    Args:
        fault: the method that fails.
        rank: of the process in which it fails.
        folder: where the file goes, under the fault's name.
    """

    name = "test/sizes"

    def __init__(self, fault: str, rank: int, folder: str) -> None:
        is_here = rank == int(os.environ.get("LOCAL_RANK", 0))
        self.fault, self.path = fault if is_here else "none", Path(folder, fault)

    @property
    def state_key(self) -> str:
        """What Lightning tells callbacks apart by."""
        return self.path.name

    def fail(self, method: str) -> None:
        if self.fault == method:
            raise RuntimeError(f"{method} cannot")

    def reset(self) -> None:
        self.fail("reset")
        self.sizes: list[int] = []

    def update(self, outputs: Any, batch: Any) -> None:
        self.fail("update")
        assert torch.equal(outputs["labels"], batch[1])
        self.sizes.append(len(batch[1]))

    def kept(self) -> Any:
        self.fail("kept")
        return (lambda: None) if self.fault == "pickle" else self.sizes

    def draw(self, parts: list[Any]) -> Figure:
        self.fail("draw")
        self.path.write_text(repr(parts))
        return Figure()


@pytest.mark.parametrize(
    ("strategy", "rank", "faults", "drawn"),
    [
        ("cpu", 0, FAULTS, "[[4, 4, 1]]"),
        # One that fails lets none of the others wait.
        ("ddp", 1, ("none", "update", "pickle"), "[[4, 1], [4]]"),
    ],
)
def test_a_picture_that_fails_costs_no_result_and_no_other_picture(
    strategy: str, rank: int, faults: tuple[str, ...], drawn: str, tmp_path: Path
) -> None:
    run_dir = train_command(
        tmp_path / "runs",
        *("data=synthetic", "model=mlp", "data.num_train=64", "trainer.max_epochs=1"),
        *("data.num_test=9", "data.batch_size=4", "trainer.enable_progress_bar=false"),
        *(f"strategy={strategy}", "trainer.accelerator=cpu"),
        *(["trainer.devices=2"] if strategy == "ddp" else []),
        *(f"+callbacks.{fault}._target_={__name__}.Sizes" for fault in faults),
        *(f"+callbacks.{fault}.fault={fault}" for fault in faults),
        *(f"+callbacks.{fault}.rank={rank}" for fault in faults),
        *(f"+callbacks.{fault}.folder={tmp_path}" for fault in faults),
    )
    assert {path.name for path in tmp_path.iterdir()} == {"none", "runs"}
    assert (tmp_path / "none").read_text() == drawn
    screen = (tmp_path / "runs" / "screen.txt").read_text()
    assert screen.count("Sizes is not drawn: ") == len(faults) - 1
    assert "Traceback" not in screen
    if strategy == "cpu":  # only rank 0 writes the log file
        assert (run_dir / "run.log").read_text().count("Traceback") == len(faults) - 1
