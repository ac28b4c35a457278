"""The kinds of modules, the data that each takes, and what comes of it under each strategy.

A cell is empty where the run ends with the weights and values of one process. Otherwise it says:

    with                        equal with the settings of the kind, which the refusal names
    refused: <text>             refused in a sentence with this text
    different: <text>           different by definition; the command prints this text
    different: docs: <text>     different by definition; docs/strategies.md has this text
"""

from dataclasses import dataclass

WITH = "with"
TOKENS = "different: Say what it is a mean over"
SUM = "different: is a sum over samples"
PAIRS = "different: compares the samples of a batch with each other"
UNTOLD_PAIRS = "different: docs: is another loss on a smaller batch"
BATCHNORM = "different: BatchNorm sees each share alone"
MASKS = "different: dropout draws other masks"
RANDOM = "different: docs: Random numbers of a step are others in each process"
TRAINING = "different: docs: what they log is of process 0's share of the batch"
CHANGED = "refused: give the loss a copy"
ONE_KEY = "refused: leave out add_dataloader_idx=False"
REENTRANT = "refused: use_reentrant=False"
GATHERED = "refused: self.all_gather needs one shape"
IN_STEP = "refused: Unfreeze it before the step"
COUNTED = "refused: append what it is computed from to a list of the module"
ROWS = "refused: does not treat each row by itself"
NOT_FIRST = "refused: dimension 0 is not the batch"
NO_ROWS = "refused: Pass tensors with one row per sample"
WRITTEN = "refused: is written by forward() from its samples"
OWN = "different: is written by each process from its own samples"


@dataclass(frozen=True)
class Kind:
    """A module, and the cells that are not equal; ``ddp`` is for two and three processes."""

    model: str  # in this package
    dataset: str = "Flowers"
    data: str = "Data"
    words: tuple[str, ...] = ()  # of its command
    settings: tuple[str, ...] = ()  # typed where a refusal names them
    dp: str = ""
    ddp: str = ""
    ddp3: str | None = None  # None: as two
    fsdp: str | None = None  # None: as two of ddp
    ddp2: str = ""
    cpu: str = ""

    def expected(self, strategy: str) -> str:
        """What must come of it."""
        three = self.ddp if self.ddp3 is None else self.ddp3
        fsdp = self.ddp if self.fsdp is None else self.fsdp
        cells = {"cpu": self.cpu, "dp(2)": self.dp, "ddp(2)": self.ddp, "fsdp(2)": fsdp}
        return (cells | {"ddp(3)": three, "ddp2(2x2)": self.ddp2})[strategy]


KINDS = {
    "classifier": Kind("classifiers.Classifier"),
    "classifier, `harness.DataModule`": Kind("classifiers.Classifier", data="OwnData"),
    "class weights": Kind("classifiers.ClassWeights", ddp=TOKENS, ddp2=TOKENS),
    "class weights, `mean_over`": Kind("declared.ClassWeights", data="OwnData"),
    "sum of losses": Kind("classifiers.SumOfLosses", ddp=SUM, ddp2=SUM),
    "sum of losses, `mean_over`": Kind("declared.SumOfLosses"),
    "gradient clipping, schedule by step": Kind(
        "classifiers.Schedule", words=("trainer.gradient_clip_val=0.1",)
    ),
    "schedule by validation": Kind("classifiers.Plateau", data="OwnData"),
    "BatchNorm": Kind(
        "classifiers.BatchNorm",
        dp=BATCHNORM,
        ddp=BATCHNORM,
        fsdp="refused: leaves each process the BatchNorm statistics",
        ddp3="refused: BatchNorm got a share of one sample",
        ddp2="refused: BatchNorm got a share of one sample",
    ),
    "BatchNorm, `sync_batchnorm`": Kind(
        "classifiers.BatchNorm",
        words=("trainer.sync_batchnorm=true",),
        dp="refused: Use strategy=ddp, or",
        ddp2="refused: Use strategy=ddp, or",
    ),
    "BatchNorm in a frozen backbone": Kind("classifiers.FrozenBackbone"),
    "unfrozen by `BaseFinetuning`": Kind("unfrozen.ByCallback"),
    "unfrozen and frozen by hooks": Kind(
        "unfrozen.ByHooks", data="OwnData", words=("trainer.accumulate_grad_batches=2",)
    ),
    "unfrozen in the step": Kind("unfrozen.InStep", ddp=IN_STEP, ddp2=IN_STEP),
    "dropout": Kind("classifiers.Dropout", ddp=MASKS, ddp2=MASKS),
    "noise in forward (VAE)": Kind("habits.Autoencoder", dp=RANDOM, ddp=RANDOM, ddp2=RANDOM),
    "mixup in the step": Kind("habits.Mixup", ddp=RANDOM, ddp2=RANDOM),
    "gradient penalty": Kind("habits.GradientPenalty", data="OwnData"),
    "statistics of the training data": Kind(
        "habits.Standardised",
        ddp="refused: computed from one process's data",
        ddp2="refused: computed from one process's data",
    ),
    "unused parameters": Kind(
        "classifiers.UnusedParameters",
        settings=("trainer.strategy.find_unused_parameters=true",),
        ddp=WITH,
        fsdp="",
        ddp2=WITH,
    ),
    "torchmetrics, also with lists": Kind("classifiers.Metrics", data="OwnData"),
    "loss in forward": Kind(
        "classifiers.LossInForward",
        settings=("trainer.strategy.scalar_outputs=mean",),
        dp=WITH,
        ddp2=WITH,
    ),
    "loss in outputs (`ModelOutput`)": Kind(
        "classifiers.LossInOutputs",
        data="OwnData",
        settings=("trainer.strategy.scalar_outputs=mean",),
        dp=WITH,
        ddp2=WITH,
    ),
    "`NamedTuple` outputs": Kind("classifiers.NamedTuples"),
    "dataclass outputs": Kind("classifiers.Dataclasses", data="OwnData"),
    "compiled network": Kind("classifiers.Compiled", fsdp="refused: has no compiled networks"),
    "checkpointing": Kind(
        "classifiers.Checkpointed", words=("+model.use_reentrant=false", "+model.num_calls=2")
    ),
    "checkpointing, reentrant": Kind(
        "classifiers.Checkpointed", words=("+model.use_reentrant=true",), ddp2=REENTRANT
    ),
    "the same part twice, reentrant": Kind(
        "classifiers.Checkpointed",
        words=("+model.use_reentrant=true", "+model.num_calls=2"),
        ddp=REENTRANT,
        fsdp="",
        ddp2=REENTRANT,
    ),
    "masked language": Kind("text.MaskedLanguage", "Sentences", ddp=TOKENS, ddp2=TOKENS),
    "masked language, `mean_over`": Kind("declared.MaskedLanguage", "Sentences"),
    "masked language, manual, `mean_over`": Kind("declared.ByHand", "Sentences"),
    "accumulated, `mean_over`": Kind(
        "declared.MaskedLanguage",
        "Sentences",
        "OwnData",
        words=("trainer.accumulate_grad_batches=2",),
    ),
    "accumulated, without `mean_over`": Kind(
        "text.MaskedLanguage",
        "Sentences",
        words=("trainer.accumulate_grad_batches=2",),
        ddp=TOKENS,
        ddp2=TOKENS,
    ),
    "shares without a label": Kind("text.SafeMean", "FewLabels", ddp=TOKENS, ddp2=TOKENS),
    "shares without a label, `mean_over`": Kind("declared.SafeMean", "FewLabels"),
    "shares without a label, NaN": Kind("declared.MaskedLanguage", "FewLabels"),
    "sum over pixels by number of objects, `sum_over`": Kind("declared.Objects", "FewLabels"),
    "causal language": Kind("text.CausalLanguage", "Sentences", "OwnData", ddp=TOKENS, ddp2=TOKENS),
    "causal language, `mean_over`": Kind("declared.CausalLanguage", "Sentences", "OwnData"),
    "two denominators (BERT)": Kind("text.TwoHeads", "Sentences", ddp=TOKENS, ddp2=TOKENS),
    "two denominators, `mean_over`": Kind("declared.TwoHeads", "Sentences"),
    "padded RNN, summed in forward": Kind("sequences.PaddedSums", "Series"),
    "padded to the longest": Kind(
        "sequences.OwnLongest",
        "Series",
        dp="refused: total_length=x.shape[1]",
        ddp2="refused: total_length=x.shape[1]",
    ),
    "padded to `total_length`": Kind("sequences.TotalLength", "Series", "OwnData"),
    "lengths in a list": Kind(
        "sequences.ListOfLengths",
        "Series",
        dp="refused: one number per sample",
        ddp2="refused: one number per sample",
    ),
    "`PackedSequence` in and out": Kind("sequences.Packed", "Series", "OwnData"),
    "time first": Kind("sequences.TimeFirst", "TimeFirst", dp=ROWS, ddp2=ROWS),
    "time first, as long as the batch": Kind(
        "sequences.TimeFirst", "TimeFirstAsLong", dp=ROWS, ddp2=ROWS
    ),
    "time first, last step": Kind(
        "sequences.LastStep", "TimeFirstAsLong", "OwnData", dp=NOT_FIRST, ddp2=ROWS
    ),
    "state from batch to batch": Kind(
        "habits.Stateful", "Scans", "DropsLast", dp=NOT_FIRST, ddp2=NOT_FIRST
    ),
    "mask as long as the batch": Kind(
        "sequences.Attention",
        "Scans",
        settings=("trainer.strategy.whole_inputs=[mask]",),
        dp=WITH,
        ddp2=WITH,
    ),
    "graphs as lists": Kind("graphs.GraphLists", "GraphList", dp=NO_ROWS, ddp2=NO_ROWS),
    "graphs as dicts": Kind("graphs.GraphDicts", "Graphs", dp=NO_ROWS, ddp2=NO_ROWS),
    "graphs as objects (PyG)": Kind("graphs.GraphObjects", "GraphObjects"),
    "graphs as tensors, `self.net(...)`": Kind(
        "graphs.PartsOfGraphs",
        "Graphs",
        "OwnData",
        settings=("trainer.strategy.modules=[net]",),
        dp=NO_ROWS,
        ddp2=NO_ROWS,
    ),
    "nodes": Kind("graphs.Nodes", "Graphs", ddp=TOKENS, dp=NO_ROWS, ddp2=NO_ROWS),
    "nodes, `mean_over`": Kind("declared.Nodes", "Graphs", "OwnData", dp=NO_ROWS, ddp2=NO_ROWS),
    "contrastive (InfoNCE)": Kind("comparing.Contrastive", "Views", ddp=PAIRS, ddp2=PAIRS),
    "contrastive, gathered (SimCLR)": Kind(
        "comparing.GatheredNegatives", "Views", ddp=GATHERED, ddp2=GATHERED
    ),
    "gathered, `drop_last`": Kind(
        "comparing.GatheredNegatives", "Views", "DropsLast", ddp3=GATHERED
    ),
    "triplets": Kind("comparing.TripletLoss", "Triplets", "OwnData"),
    "hardest pairs of the batch": Kind(
        "comparing.HardestInBatch", "Views", ddp=UNTOLD_PAIRS, ddp2=UNTOLD_PAIRS
    ),
    "queue written by forward (MoCo)": Kind(
        "comparing.Queue", "Views", dp=WRITTEN, ddp=OWN, ddp2=WRITTEN
    ),
    "queue written by the step, gathered": Kind(
        "comparing.QueueInStep", "Views", ddp=GATHERED, ddp2=GATHERED
    ),
    "queue by the step, `drop_last`": Kind(
        "comparing.QueueInStep", "Views", "DropsLast", ddp3=GATHERED
    ),
    "queue changed before backward": Kind(
        "comparing.ForgottenClone",
        "Views",
        "DropsLast",
        cpu=CHANGED,
        dp=CHANGED,
        ddp=CHANGED,
        ddp3=GATHERED,
        ddp2=CHANGED,
    ),
    "teacher with EMA": Kind("comparing.Teacher", "Views", "OwnData"),
    "codebook with EMA (VQ)": Kind(
        "comparing.Codebook", "Views", dp=WRITTEN, ddp=OWN, ddp2=WRITTEN
    ),
    "GAN, manual": Kind(
        "several.Adversaries",
        settings=(
            "trainer.strategy.modules=[generator,discriminator]",
            "trainer.strategy.find_unused_parameters=true",
        ),
        dp=WITH,
        ddp=WITH,
        fsdp="",
        ddp2=WITH,
    ),
    "two optimizers, accumulated by hand": Kind("several.AccumulatesByHand", data="OwnData"),
    "SAM": Kind("several.SharpnessAware"),
    "LBFGS": Kind("several.Lbfgs", fsdp="refused: strategy=fsdp has no LBFGS"),
    "two tasks, two loaders": Kind("several.TwoTasks", data="TwoTasks"),
    "two validation loaders": Kind(
        "logged.TwoValidations",
        data="TwoValidations",
        words=("objective=val/loss/dataloader_idx_0", "mode=min"),
    ),
    "two validation loaders, one key": Kind(
        "logged.OneKey", data="TwoValidations", cpu=ONE_KEY, dp=ONE_KEY, ddp=ONE_KEY, ddp2=ONE_KEY
    ),
    "collected in lists": Kind("logged.Collected"),
    "collected within epochs": Kind(
        "logged.Collected",
        words=(
            "trainer.val_check_interval=2",
            "trainer.num_sanity_val_steps=2",
            "trainer.limit_val_batches=3",
        ),
    ),
    "collected dicts": Kind("logged.CollectedDicts", data="OwnData"),
    "counted by hand": Kind("logged.Counters", ddp=COUNTED, ddp2=COUNTED),
    "counted in tensors, `sync_dist`": Kind("logged.CountersOfTensors", data="OwnData"),
    "counted by hand, gathered": Kind("logged.GatheredCounters"),
    "counted by hand, `all_reduce`": Kind("logged.ReducedCounters"),
    "lists and counters, gathered": Kind(
        "logged.ListsAndCounters",
        data="EvenData",
        ddp="refused: Append what is counted to a list",
        ddp2="refused: Append what is counted to a list",
    ),
    "gathered in validation steps": Kind("logged.GatheredSteps"),
    "collected in a growing tensor": Kind("logged.GrowingTensor", ddp=COUNTED, ddp2=COUNTED),
    "collected in an object": Kind("logged.Recorded", ddp=COUNTED, ddp2=COUNTED),
    "collected in training": Kind("habits.EpochLoss", ddp=TRAINING, ddp2=TRAINING),
    "max, min and sum of steps": Kind("logged.Reductions"),
    "gathered by the author": Kind("logged.Gathered", words=("objective=val/auc", "mode=max")),
    "gathered as objects by the author": Kind(
        "logged.GatheredObjects", data="OwnData", words=("objective=val/auc", "mode=max")
    ),
}
