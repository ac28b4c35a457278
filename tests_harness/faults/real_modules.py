"""What real modules use, each as one run that is killed: a module, data, callbacks and settings."""

from dataclasses import dataclass
from pathlib import Path

from tests_harness.strategy_runs import write_conf

MODULES, LOADERS = "tests_harness.modules", "tests_harness.loaders.zoo"
OF_LIGHTNING = "pytorch_lightning.callbacks"
STATE = f"{MODULES}.with_state"


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
    "EMA of Lightning, ddp": Configuration(
        "classifiers.Schedule", "data.OwnData", words=AVERAGE, num_processes=2
    ),
    "queue (MoCo)": Configuration("comparing.QueueInStep", dataset="Views"),
    "codebook (VQ)": Configuration("comparing.Codebook", dataset="Views"),
    "best 3, EMA, workers": Configuration(
        "classifiers.Dropout", "data.OwnData", words=(*BEST_THREE, *AVERAGE, *OFTEN, *WORKERS)
    ),
    "lists of validations, ddp": Configuration("logged.Collected", words=OFTEN, num_processes=2),
    "a replay buffer": Configuration("with_state.Replay"),
    "EMA in a callback without state_dict": Configuration(
        "classifiers.Classifier", words=callback("mine", f"{STATE}.Average")
    ),
    "stream, workers, ddp": Configuration(
        f"{LOADERS}.Module", f"{LOADERS}.Data", "stream in parts", WORKERS, 2
    ),
    "stream with state": Configuration(f"{LOADERS}.Module", f"{LOADERS}.Data", "stream with state"),
    "plain loader, augmented, workers": Configuration(
        f"{LOADERS}.Module", f"{LOADERS}.Data", "shuffled", WORKERS
    ),
    "several loaders, ddp": Configuration(
        f"{LOADERS}.Module", f"{LOADERS}.Data", "several", num_processes=2
    ),
    "accumulation, mean_over": Configuration(
        "declared.MaskedLanguage",
        "data.OwnData",
        "Sentences",
        ("trainer.accumulate_grad_batches=2",),
        2,
    ),
    "accumulated by hand, ddp": Configuration("several.AccumulatesByHand", num_processes=2),
    "ReduceLROnPlateau": Configuration("classifiers.Plateau", "data.OwnData", words=OFTEN),
    "BatchNorm, sync_batchnorm": Configuration(
        "classifiers.BatchNorm", words=("trainer.sync_batchnorm=true",), num_processes=2
    ),
    "torchmetrics, with lists": Configuration("classifiers.Metrics", "data.OwnData", words=OFTEN),
    "every kind of log and metric, ddp": Configuration(
        "tests_harness.faults.plain_module.PlainModule",
        "project.data.synthetic.Synthetic",
        words=("+data.batch_size=250", "+data.noise=0.1", "+data.seed=1"),
        num_processes=2,
        is_double=False,
    ),
    "bf16-mixed, workers": Configuration(
        "tests_harness.faults.plain_module.PlainModule",
        "project.data.synthetic.Synthetic",
        words=(
            "trainer.precision=bf16-mixed",
            "+data.batch_size=250",
            "+data.seed=1",
            "+data.num_workers=2",
            *OFTEN,
        ),
        is_double=False,
    ),
    "two validation loaders": Configuration(
        "logged.TwoValidations",
        "data.TwoValidations",
        words=("objective=val/loss/dataloader_idx_0", "mode=min"),
    ),
    "graphs": Configuration("declared.Nodes", dataset="Graphs", num_processes=2),
    "weights averaged at the end (SWA)": Configuration(
        "classifiers.BatchNorm",
        words=callback("swa", f"{OF_LIGHTNING}.StochasticWeightAveraging", swa_lrs=0.05),
    ),
    "a backbone that thaws": Configuration(
        "with_state.Tunes", words=callback("thaw", f"{STATE}.Thaw")
    ),
    "a curriculum": Configuration(
        "classifiers.Dropout",
        "with_state.Curriculum",
        words=("+trainer.reload_dataloaders_every_n_epochs=1",),
    ),
}


def words(name: str, folder: Path) -> list[str]:
    """Write a configuration's YAML below a folder; the words of its command."""
    chosen = CONFIGURATIONS[name]

    def target(path: str) -> str:
        is_ours = path.startswith(("project.", "tests_harness."))
        return f"_target_: {path if is_ours else f'{MODULES}.{path}'}\n"

    data = target(chosen.data)
    if chosen.data.startswith(LOADERS):
        data += f"kind: {chosen.dataset}\n"
    elif not chosen.data.startswith("project."):
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
