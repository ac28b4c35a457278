"""The kinds of modules, and what each is trained with; what comes of it: tests/verdicts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A module of this package, and its data."""

    model: str
    dataset: str = "Flowers"
    data: str = "Data"
    words: tuple[str, ...] = ()  # of its command
    settings: tuple[str, ...] = ()  # typed where a refusal names them


MEAN = ("trainer.strategy.scalar_outputs=mean",)
DECLARED = ("+model.is_declared=true",)
UNUSED = "trainer.strategy.find_unused_parameters=true"
WHOLE = "trainer.strategy.whole_inputs="
ACCUMULATED = ("trainer.accumulate_grad_batches=2",)
REENTRANT = "+model.use_reentrant=true"
TWICE = "+model.num_calls=2"
AUC = ("objective=val/auc", "mode=max")
WITHIN = (
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=3",
    "trainer.num_sanity_val_steps=2",
)
OF_FIRST = ("objective=val/loss/dataloader_idx_0", "mode=min")
NETWORKS = "trainer.strategy.modules=[generator,discriminator]"

KINDS = {
    "classifier": Kind("classifiers.Classifier"),
    "class weights": Kind("habits.ClassWeights"),
    "class weights, `mean_over`": Kind("habits.ClassWeights", data="OwnData", words=DECLARED),
    "sum of losses": Kind("habits.SumOfLosses"),
    "sum of losses, `sum_over`": Kind("habits.SumOfLosses", words=DECLARED),
    "gradient clipping, schedule by step": Kind(
        "classifiers.Schedule", words=("trainer.gradient_clip_val=0.1",)
    ),
    "schedule by validation": Kind("classifiers.Plateau", data="OwnData"),
    "BatchNorm": Kind("classifiers.BatchNorm"),
    "BatchNorm, `sync_batchnorm`": Kind(
        "classifiers.BatchNorm", words=("trainer.sync_batchnorm=true",)
    ),
    "BatchNorm in a frozen backbone": Kind("classifiers.FrozenBackbone"),
    "unfrozen by `BaseFinetuning`": Kind("unfrozen.ByCallback"),
    "unfrozen and frozen by hooks": Kind("unfrozen.ByHooks", data="OwnData", words=ACCUMULATED),
    "unfrozen in the step": Kind("unfrozen.InStep"),
    "dropout": Kind("classifiers.Dropout"),
    "noise in forward (VAE)": Kind("habits.Noise"),
    "mixup in the step": Kind("habits.Mixup"),
    "gradient penalty": Kind("habits.GradientPenalty", data="OwnData"),
    "statistics of the training data": Kind("habits.Standardised"),
    "unused parameters": Kind("classifiers.UnusedParameters", settings=(UNUSED,)),
    "torchmetrics, also with lists": Kind("classifiers.Metrics", data="OwnData"),
    "loss in forward": Kind("classifiers.LossInForward", settings=MEAN),
    "loss in outputs (`ModelOutput`)": Kind(
        "classifiers.LossInOutputs", data="OwnData", settings=MEAN
    ),
    "`NamedTuple` outputs": Kind("classifiers.NamedTuples"),
    "dataclass outputs": Kind("classifiers.Dataclasses", data="OwnData"),
    "compiled network": Kind("classifiers.Compiled"),
    "checkpointing": Kind("classifiers.Checkpointed", words=("+model.use_reentrant=false", TWICE)),
    "checkpointing, reentrant": Kind("classifiers.Checkpointed", words=(REENTRANT,)),
    "the same part twice, reentrant": Kind("classifiers.Checkpointed", words=(REENTRANT, TWICE)),
    "masked language": Kind("text.MaskedLanguage", "Sentences"),
    "masked language, `mean_over`": Kind("text.MaskedLanguage", "Sentences", words=DECLARED),
    "masked language, manual, `mean_over`": Kind("text.ByHand", "Sentences"),
    "accumulated, `mean_over`": Kind(
        "text.MaskedLanguage", "Sentences", "OwnData", words=(*DECLARED, *ACCUMULATED)
    ),
    "accumulated, without `mean_over`": Kind("text.MaskedLanguage", "Sentences", words=ACCUMULATED),
    "shares without a label, NaN": Kind("text.MaskedLanguage", "FewLabels", words=DECLARED),
    "sum over pixels by number of objects, `sum_over`": Kind("text.Objects", "FewLabels"),
    "padded to the longest": Kind(
        "sequences.Padded", "Series", words=("+model.has_total_length=false",)
    ),
    "padded to `total_length`": Kind(
        "sequences.Padded", "Series", "OwnData", ("+model.has_total_length=true",)
    ),
    "time first, as long as the batch": Kind("sequences.TimeFirst", "TimeFirst"),
    "state from batch to batch": Kind("habits.Stateful", "Scans", "DropsLast"),
    "mask as long as the batch": Kind("sequences.Attention", "Scans", settings=(WHOLE + "[mask]",)),
    "graphs as objects (PyG)": Kind(
        "graphs.GraphObjects", "GraphObjects", settings=(WHOLE + "[batch]",)
    ),
    "nodes": Kind("graphs.Nodes", "Graphs"),
    "contrastive (InfoNCE)": Kind("comparing.Contrastive", "Views"),
    "contrastive, gathered (SimCLR)": Kind("comparing.GatheredNegatives", "Views"),
    "gathered, `drop_last`": Kind("comparing.GatheredNegatives", "Views", "DropsLast"),
    "queue written by forward (MoCo)": Kind("comparing.Queue", "Views"),
    "queue by the step, `drop_last`": Kind(
        "comparing.Queue", "Views", "DropsLast", ("+model.in_step=true",)
    ),
    "teacher with EMA": Kind("comparing.Teacher", "Views", "OwnData"),
    "GAN, manual": Kind("several.Adversaries", settings=(NETWORKS, UNUSED)),
    "two optimizers, accumulated by hand": Kind("several.AccumulatesByHand", data="OwnData"),
    "LBFGS": Kind("several.Lbfgs"),
    "two tasks, two loaders": Kind("several.TwoTasks", data="TwoTasks"),
    "two validation loaders": Kind("logged.TwoValidations", data="TwoValidations", words=OF_FIRST),
    "collected in lists": Kind("logged.Collected"),
    "collected within epochs": Kind("logged.Collected", words=WITHIN),
    "counted by hand": Kind("logged.Counters"),
    "counted by hand, `sync_dist`": Kind(
        "logged.Counters", data="OwnData", words=("+model.adds=sync_dist",)
    ),
    "counted by hand, `all_reduce`": Kind("logged.Counters", words=("+model.adds=all_reduce",)),
    "gathered in validation steps": Kind("logged.GatheredSteps"),
    "collected in training": Kind("habits.EpochLoss"),
    "max, min and sum of steps": Kind("logged.Reductions"),
    "gathered by the author": Kind("logged.Gathered", words=AUC),
    "gathered as objects by the author": Kind("logged.GatheredObjects", data="OwnData", words=AUC),
    "root of a mean (RMSE)": Kind("habits.RootMeanSquare"),
    "term where a class is in the batch": Kind("habits.OnlyWithClass"),
    "bank in a list": Kind("habits.Bank"),
}
