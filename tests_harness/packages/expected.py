"""What each public module does in each cell. The tests hold it against runs; docs show it."""

from dataclasses import dataclass, field

COLUMNS = {
    "train": "trains and, where the module has a test, tests",
    "ddp": "two processes end with the weights of one (within 1e-5)",
    "dp": "one process with two logical devices ends with the weights of one (within 1e-5)",
    "resume": "killed with SIGKILL inside of the second epoch, it goes on and ends equal by bit",
    "evaluate": "`evaluate.py` gives the numbers of the test after training",
    "predict": "`predict.py` writes predictions",
    "convert": "`scripts/convert_checkpoint.py` writes the network's weights, plain and equal",
    "weights_only": "`torch.load(weights_only=True)` reads `best.ckpt`",
}


@dataclass(frozen=True)
class Refused:
    """The command ends with status 1 and a sentence.

    Args:
        says: part of the sentence, as a regular expression.
        why: for the table.
    """

    says: str
    why: str


@dataclass(frozen=True)
class Differs:
    """The command works, and its result is another by definition.

    Args:
        why: for the table.
    """

    why: str


@dataclass(frozen=True)
class Package:
    """A public module.

    Args:
        title: for the table, with its package.
        cells: what does not simply work, by column.
        words: what a column's command needs besides.
    """

    title: str
    cells: dict[str, Refused | Differs] = field(default_factory=dict)
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)


NO_TEST = Refused(r"nothing to evaluate: \w+ has no test_step", "it has no `test_step`")
NO_PREDICTIONS = Refused("there is nothing to predict", "it has no loader to predict on")
ONE_SAMPLE = Refused(
    "batch_size=1 cannot be shared by 2 processes",
    "its batches hold one sample, which two cannot share",
)
OWN_STEP = Refused(
    r"through self\(\.\.\.\)", "its step does not call `self(...)`, which dp splits over devices"
)
OWN_FORWARD = Refused(
    "has no predict_step, and its forward does not take the batch", "it has no `predict_step`"
)
# pytorch-forecasting restores its loss and its metrics as objects, and predicts for itself.
OWN_CALLBACK = Refused("in predict_step: IndexError", "its `predict_step` wants its own callback")
OWN_OUTPUTS = Refused(
    "reshape or reduce them in the step", "its forward returns more than a row per sample"
)
OWN_GAMES = Differs("each process plays games of its own")
# A backward pass reaches the parameters of one network only.
TWO_NETWORKS = {"ddp": ("++trainer.strategy.find_unused_parameters=true",)}
PLAYED = Differs("the environment and what was played are not part of a checkpoint")
AUTHORS = Refused("Unsupported global", "the author keeps objects in it; the harness reads it")

PACKAGES = {
    "boring": Package("BoringModel (pytorch-lightning)", {"ddp": ONE_SAMPLE}),
    "image_classifier": Package("image classifier (Lightning's example, rewritten)"),
    "gan": Package(
        "GAN, two optimizers by hand (Lightning's example, rewritten)",
        {
            "ddp": Differs("each process draws its own noise, and BatchNorm sees its own share"),
            "dp": Differs("BatchNorm sees the share of each device"),
            "evaluate": NO_TEST,
            "predict": OWN_FORWARD,
        },
        words=TWO_NETWORKS,
    ),
    "transformer": Package(
        "transformer (pytorch-lightning's demo)",
        {
            "ddp": ONE_SAMPLE,
            "dp": Differs("its dropout cannot be switched off by YAML"),
            "evaluate": NO_TEST,
            "predict": NO_PREDICTIONS,
        },
    ),
    "ppo": Package(
        "PPO (Lightning's example, rewritten)",
        {
            "ddp": OWN_GAMES,
            "dp": Refused("cannot be multiplied", "it plays with one sample, which dp splits"),
            "resume": PLAYED,
            "evaluate": NO_TEST,
            "predict": NO_PREDICTIONS,
        },
        words=TWO_NETWORKS,
    ),
    "dqn": Package(
        "DQN (Lightning's example, rewritten)",
        {
            "ddp": OWN_GAMES,
            "dp": OWN_STEP,
            "resume": PLAYED,
            "evaluate": NO_TEST,
            "predict": NO_PREDICTIONS,
        },
        words=TWO_NETWORKS,
    ),
    "chemprop": Package("MPNN (chemprop 2.3)", {"dp": OWN_STEP, "weights_only": AUTHORS}),
    "nbeats": Package(
        "NBeats (pytorch-forecasting 1.8)",
        {"dp": OWN_OUTPUTS, "predict": OWN_CALLBACK, "weights_only": AUTHORS},
    ),
    "tft": Package(
        "Temporal Fusion Transformer (pytorch-forecasting 1.8)",
        {"dp": OWN_OUTPUTS, "predict": OWN_CALLBACK, "weights_only": AUTHORS},
    ),
    "deepar": Package(
        "DeepAR (gluonts 0.17)",
        {"dp": OWN_STEP, "evaluate": NO_TEST, "predict": NO_PREDICTIONS},
    ),
    "nequip": Package(
        "NequIP (nequip 0.19)",
        {
            "ddp": Differs("its own script tells its loss how many processes there are"),
            "dp": Refused("whole_inputs", "a batch is one graph, which dp cannot split"),
            "predict": Refused("No predict dataset", "its data module got nothing to predict on"),
        },
    ),
    "rl4co": Package(
        "attention model, REINFORCE (rl4co 0.7)",
        {
            "ddp": Differs("each process draws its own tours"),
            "dp": OWN_STEP,
            "predict": OWN_FORWARD,
            "weights_only": AUTHORS,
        },
        words={"convert": ("--keep-module",)},  # a layer of it is called `module`
    ),
    "deeptab": Package(
        "MLP on a table (deeptab 2.1)",
        {
            "evaluate": Refused("No test dataset provided", "its data module has no labelled test"),
            "weights_only": AUTHORS,
        },
    ),
}
