"""Features of real modules, each in a run to kill: a module, data, callbacks and settings."""

from pathlib import Path
from typing import NamedTuple

from tests.strategy_runs import write_conf

OF_LIGHTNING = "pytorch_lightning.callbacks"
PLAIN = "tests.faults.plain_module.PlainModule"
FLOWERS = "_target_: tests.modules.data.Data\ndataset: Flowers\n"
FLOWERS_OF_AN_OWNER = "_target_: tests.modules.data.OwnData\ndataset: Flowers\n"
STREAM = "_target_: tests.loaders.zoo.Data\nkind: stream in parts\n"
SYNTHETIC = "_target_: small.data.Synthetic\nbatch_size: 250\nnoise: 0.1\nseed: 1\n"

DOUBLE = "trainer.precision=64-true"
DDP = ("strategy=ddp", "trainer.devices=2")
WORKERS = "+data.num_workers=2"
OFTEN = "trainer.val_check_interval=2"
BEST_THREE = ("callbacks.checkpoint.save_top_k=3", "callbacks.checkpoint.filename='{step}'")
AVERAGE = (
    f"+callbacks.ema._target_={OF_LIGHTNING}.EMAWeightAveraging",
    "+callbacks.ema.decay=0.8",
)
AVERAGE_AT_THE_END = (
    f"+callbacks.swa._target_={OF_LIGHTNING}.StochasticWeightAveraging",
    "+callbacks.swa.swa_lrs=0.05",
)


class Configuration(NamedTuple):
    """A run of about 40 steps: its module, its data in YAML, and the overrides of its command."""

    module: str
    data: str
    words: tuple[str, ...]


CONFIGURATIONS: dict[str, Configuration] = {
    "GAN, manual": Configuration(
        "tests.modules.several.Adversaries",
        FLOWERS,
        (DOUBLE, *DDP, "trainer.strategy.find_unused_parameters=true"),
    ),
    "best 3, EMA, workers": Configuration(
        "tests.modules.classifiers.Dropout",
        FLOWERS_OF_AN_OWNER,
        (DOUBLE, *BEST_THREE, *AVERAGE, OFTEN, WORKERS),
    ),
    "lists of validations, ddp": Configuration(
        "tests.modules.logged.Collected", FLOWERS, (DOUBLE, *DDP, OFTEN)
    ),
    "stream, workers, ddp": Configuration(
        "tests.loaders.zoo.Module", STREAM, (DOUBLE, *DDP, WORKERS)
    ),
    "accumulated by hand, ddp": Configuration(
        "tests.modules.several.AccumulatesByHand", FLOWERS, (DOUBLE, *DDP)
    ),
    "every kind of log and metric, ddp": Configuration(PLAIN, SYNTHETIC, DDP),
    "bf16-mixed, workers": Configuration(
        PLAIN, SYNTHETIC, ("trainer.precision=bf16-mixed", WORKERS, OFTEN)
    ),
    "weights averaged at the end (SWA)": Configuration(
        "tests.modules.classifiers.BatchNorm", FLOWERS, (DOUBLE, *AVERAGE_AT_THE_END)
    ),
    "a backbone that thaws": Configuration("tests.modules.unfrozen.ByCallback", FLOWERS, (DOUBLE,)),
}


def words(name: str, folder: Path) -> list[str]:
    """Write a configuration's YAML below a folder; return the overrides of its command."""
    module, data, chosen = CONFIGURATIONS[name]
    own = write_conf(folder, data=data, model=f"_target_: {module}\n")
    return [*own, *(["strategy=cpu"] if DDP[0] not in chosen else []), *chosen]
