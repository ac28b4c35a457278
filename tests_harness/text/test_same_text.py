"""A text trains the same under every strategy, and after a kill; uneven lines are the hard case."""

import json
import random
from pathlib import Path

import pytest
import torch

from harness.text.sentences import sentences
from tests_harness.faults.fork_server import command

EXPERIMENT = (
    *("experiment=text", "data.batch_size=7", "data.length=48", "trainer.max_epochs=2"),
    *("model.net.width=16", "model.net.num_layers=2", "model.net.num_heads=2"),
    *("trainer.precision=64-true", "trainer.limit_test_batches=3", "strategy=cpu"),
    *("callbacks.progress_bar=null", "trainer.log_every_n_steps=2"),
)
UNITS = {
    "lines": ("data.unit=lines",),
    "packed": ("data.unit=lines", "data.packing=true"),
    "corpus": ("data.unit=corpus",),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Lines of very different lengths."""
    folder = tmp_path_factory.mktemp("text")
    lines = sentences(83, 1).splitlines()
    rng = random.Random(0)
    lines = [line[: rng.choice([1, 3, 10, 80])] for line in lines]
    (folder / "text.txt").write_text("\n".join(lines))
    return f"data.file={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}"


def finished(folder: Path, *words: str) -> dict[str, object]:
    result = command("train.py", *EXPERIMENT, *words, f"output_dir={folder}")
    assert result.returncode == 0, result.stderr
    (run,) = (folder / "text").iterdir()
    return {
        "weights": torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"],
        "results": json.loads((run / "results.json").read_text()),
        "samples": {path.name: path.read_text() for path in (run / "samples").iterdir()},
    }


@pytest.fixture(scope="module")
def one_process(text, tmp_path_factory: pytest.TempPathFactory):
    found: dict[str, dict[str, object]] = {}

    def of(unit: str) -> dict[str, object]:
        if unit not in found:
            found[unit] = finished(tmp_path_factory.mktemp(unit), *text, *UNITS[unit])
        return found[unit]

    return of


@pytest.mark.parametrize(
    ("unit", "strategy"),
    [
        ("lines", ("strategy=dp", "trainer.devices=2")),
        ("lines", ("strategy=ddp", "trainer.devices=2")),
        ("lines", ("strategy=ddp", "trainer.devices=3", "data.num_workers=1")),
        ("lines", ("trainer.accumulate_grad_batches=3",)),
        ("packed", ("strategy=ddp", "trainer.devices=3")),
        ("corpus", ("strategy=ddp", "trainer.devices=3")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_weights_and_scores_are_those_of_one_process(
    unit: str, strategy: tuple[str, ...], text, one_process, tmp_path: Path
) -> None:
    expected, found = one_process(unit), finished(tmp_path, *text, *UNITS[unit], *strategy)
    for name, weight in expected["weights"].items():
        assert (weight - found["weights"][name]).abs().max() <= 1e-11, name
    assert found["results"] == pytest.approx(expected["results"], abs=1e-6)
    assert found["samples"] == expected["samples"]
