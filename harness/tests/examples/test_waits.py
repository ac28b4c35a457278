"""No step waits for the device between two rows of the log: no experiment, strategy or feature."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import slow
from tests.faults.fork_server import command
from tests.features.runs import WITH_BUFFERS
from tests.strategy_runs import write_conf

WAITS = "+callbacks.waits._target_=tests.workers.waits.Waits"
# The parity check, which looks at a few steps of a run, waits in these.
SHORT = (
    "trainer.max_steps=20",
    "trainer.max_epochs=-1",
    "test=false",
    "parity_check=false",
    "trainer.log_every_n_steps=10",
)
DDP = ("strategy=ddp", "trainer.devices=2")
EXPERIMENTS = {
    "default": (),
    "synthetic": ("experiment=synthetic",),
    "contrastive": ("experiment=contrastive", "data.batch_size=32"),
    "table": ("experiment=table", "data.batch_size=8"),
    "table_classes": ("experiment=table_classes", "data.batch_size=8"),
    "text": ("experiment=text", "data.length=32"),
    "images": ("experiment=images", "data.size=16", "data.batch_size=8", "model.net.width=8"),
}
FEATURES = {
    "ema": ("callbacks=ema",),
    "accumulation": ("trainer.accumulate_grad_batches=2",),
    "max_samples_per_device": ("data.max_samples_per_device=16",),
    "clipping": (
        "trainer.gradient_clip_val=0.1",
        "model.class_weights=[1.0,2.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0]",
    ),
    "sync_batchnorm": (*DDP, *WITH_BUFFERS, "trainer.sync_batchnorm=true"),
    "dp": ("strategy=dp", "trainer.devices=2"),
}


def waits(folder: Path, *overrides: str) -> dict[str, int]:
    """The places of waits, of all processes."""
    overrides = (
        *overrides,
        *SHORT,
        WAITS,
        f"+callbacks.waits.folder={folder}",
        f"output_dir={folder}",
    )
    result = command("train.py", *overrides, "trainer.accelerator=cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    found = [json.loads(path.read_text()) for path in folder.glob("waits_*.json")]
    assert found
    return {place: number for one in found for place, number in one.items()}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "shapes"
    assert command("scripts/shapes.py", folder).returncode == 0
    return folder


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, ()) for name in EXPERIMENTS if name not in ("synthetic", "table")),
        *slow(("synthetic", ()), ("table", ())),  # whose steps are those of others
        # These ranks are forked from the first one, which Polars' threads of a table forbid.
        *slow(*((name, DDP) for name in EXPERIMENTS if "table" not in name)),
    ],
)
def test_no_experiment_waits(name: str, strategy: Any, pictures: Path, tmp_path: Path) -> None:
    of_images = (f"data.root={pictures}", f"data.cache_dir={pictures.parent}")
    overrides = EXPERIMENTS[name] + (of_images if name == "images" else ())
    assert waits(tmp_path, *overrides, *strategy) == {}


@pytest.mark.parametrize("overrides", FEATURES.values(), ids=FEATURES)
def test_no_feature_waits(overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert waits(tmp_path, "experiment=synthetic", *overrides) == {}


@pytest.mark.parametrize("strategy", [DDP, *slow(((),))])
def test_no_weighted_loss_waits(strategy: Any, tmp_path: Path) -> None:
    """Nor is there a barrier in it."""
    terms = ["mean_number", "mean_tensor", "sum_number", "sum_tensor"]
    for num_batches, chosen in ((1, terms), (2, terms[1:2]), (2, terms[2:3])):
        folder = tmp_path / f"{num_batches}_{chosen[0]}"
        folder.mkdir()
        model = write_conf(folder, model=f"_target_: tests.workers.waits.Weighted\nterms: {chosen}")
        batches = f"trainer.accumulate_grad_batches={num_batches}"
        assert waits(folder, *model, batches, *strategy) == {}, chosen
