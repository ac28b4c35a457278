"""What real modules use, each as one run that is killed: a module, data, callbacks and settings."""

from dataclasses import dataclass
from pathlib import Path

from tests.strategy_runs import write_conf

MODULES, LOADERS = "tests.modules", "tests.loaders.zoo"
OF_LIGHTNING = "pytorch_lightning.callbacks"


@dataclass(frozen=True)
class Configuration:
    """A run of 40 steps, or fewer where the words say so."""

    model: str
    data: str = "data.Data"
    dataset: str = "Flowers"
    words: tuple[str, ...] = ()
    num_processes: int = 1
    is_double: bool = True

    @property
    def has_workers(self) -> bool:
        """Whether a data worker can be killed."""
        return any("num_workers=" in word for word in self.words)


def callback(name: str, target: str, **arguments: object) -> tuple[str, ...]:
    """The words that add a callback."""
    words = (f"+callbacks.{name}.{key}={value}" for key, value in arguments.items())
    return (f"+callbacks.{name}._target_={target}", *words)


AVERAGE = callback("ema", f"{OF_LIGHTNING}.EMAWeightAveraging", decay=0.8)
BEST_THREE = ("callbacks.checkpoint.save_top_k=3", "callbacks.checkpoint.filename='{step}'")
WORKERS = ("+data.num_workers=2",)
OFTEN = ("trainer.val_check_interval=2",)

CONFIGURATIONS: dict[str, Configuration] = {
    "GAN, manual": Configuration(
        "several.Adversaries",
        words=("trainer.strategy.find_unused_parameters=true",),
        num_processes=2,
    ),
    "best 3, EMA, workers": Configuration(
        "classifiers.Dropout", "data.OwnData", words=(*BEST_THREE, *AVERAGE, *OFTEN, *WORKERS)
    ),
    "lists of validations, ddp": Configuration("logged.Collected", words=OFTEN, num_processes=2),
    "stream, workers, ddp": Configuration(
        f"{LOADERS}.Module", f"{LOADERS}.Data", "stream in parts", WORKERS, 2
    ),
    "accumulated by hand, ddp": Configuration("several.AccumulatesByHand", num_processes=2),
    "every kind of log and metric, ddp": Configuration(
        "tests.faults.plain_module.PlainModule",
        "small.data.Synthetic",
        words=("+data.batch_size=250", "+data.noise=0.1", "+data.seed=1"),
        num_processes=2,
        is_double=False,
    ),
    "bf16-mixed, workers": Configuration(
        "tests.faults.plain_module.PlainModule",
        "small.data.Synthetic",
        words=(
            "trainer.precision=bf16-mixed",
            "+data.batch_size=250",
            "+data.seed=1",
            "+data.num_workers=2",
            *OFTEN,
        ),
        is_double=False,
    ),
    "weights averaged at the end (SWA)": Configuration(
        "classifiers.BatchNorm",
        words=callback("swa", f"{OF_LIGHTNING}.StochasticWeightAveraging", swa_lrs=0.05),
    ),
    "a backbone that thaws": Configuration("unfrozen.ByCallback"),
}


def words(name: str, folder: Path) -> list[str]:
    """Write a configuration's YAML below a folder; the words of its command."""
    chosen = CONFIGURATIONS[name]

    def target(path: str) -> str:
        is_ours = path.startswith(("small.", "tests."))
        return f"_target_: {path if is_ours else f'{MODULES}.{path}'}\n"

    data = target(chosen.data)
    if chosen.data.startswith(LOADERS):
        data += f"kind: {chosen.dataset}\n"
    elif not chosen.data.startswith("small."):
        data += f"dataset: {chosen.dataset}\n"
    precision = ["trainer.precision=64-true"] if chosen.is_double else []
    several = ["strategy=cpu"]
    if chosen.num_processes > 1:
        several = ["strategy=ddp", f"trainer.devices={chosen.num_processes}"]
    return [
        *write_conf(folder, data=data, model=target(chosen.model)),
        *precision,
        *several,
        *chosen.words,
    ]
