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


KINDS = {
    "classifier": Kind("classifiers.Classifier"),
    "classifier, `harness.DataModule`": Kind("classifiers.Classifier", data="OwnData"),
    "class weights": Kind("classifiers.ClassWeights"),
    "class weights, `mean_over`": Kind("declared.ClassWeights", data="OwnData"),
    "sum of losses": Kind("classifiers.SumOfLosses"),
    "sum of losses, `sum_over`": Kind("declared.SumOfLosses"),
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
    "unfrozen and frozen by hooks": Kind(
        "unfrozen.ByHooks", data="OwnData", words=("trainer.accumulate_grad_batches=2",)
    ),
    "unfrozen in the step": Kind("unfrozen.InStep"),
    "dropout": Kind("classifiers.Dropout"),
    "noise in forward (VAE)": Kind("habits.Autoencoder"),
    "mixup in the step": Kind("habits.Mixup"),
    "gradient penalty": Kind("habits.GradientPenalty", data="OwnData"),
    "statistics of the training data": Kind("habits.Standardised"),
    "unused parameters": Kind(
        "classifiers.UnusedParameters", settings=("trainer.strategy.find_unused_parameters=true",)
    ),
    "torchmetrics, also with lists": Kind("classifiers.Metrics", data="OwnData"),
    "loss in forward": Kind(
        "classifiers.LossInForward", settings=("trainer.strategy.scalar_outputs=mean",)
    ),
    "loss in outputs (`ModelOutput`)": Kind(
        "classifiers.LossInOutputs",
        data="OwnData",
        settings=("trainer.strategy.scalar_outputs=mean",),
    ),
    "`NamedTuple` outputs": Kind("classifiers.NamedTuples"),
    "dataclass outputs": Kind("classifiers.Dataclasses", data="OwnData"),
    "compiled network": Kind("classifiers.Compiled"),
    "checkpointing": Kind(
        "classifiers.Checkpointed", words=("+model.use_reentrant=false", "+model.num_calls=2")
    ),
    "checkpointing, reentrant": Kind(
        "classifiers.Checkpointed", words=("+model.use_reentrant=true",)
    ),
    "the same part twice, reentrant": Kind(
        "classifiers.Checkpointed", words=("+model.use_reentrant=true", "+model.num_calls=2")
    ),
    "masked language": Kind("text.MaskedLanguage", "Sentences"),
    "masked language, `mean_over`": Kind("declared.MaskedLanguage", "Sentences"),
    "masked language, manual, `mean_over`": Kind("declared.ByHand", "Sentences"),
    "accumulated, `mean_over`": Kind(
        "declared.MaskedLanguage",
        "Sentences",
        "OwnData",
        words=("trainer.accumulate_grad_batches=2",),
    ),
    "accumulated, without `mean_over`": Kind(
        "text.MaskedLanguage", "Sentences", words=("trainer.accumulate_grad_batches=2",)
    ),
    "shares without a label": Kind("text.SafeMean", "FewLabels"),
    "shares without a label, `mean_over`": Kind("declared.SafeMean", "FewLabels"),
    "shares without a label, NaN": Kind("declared.MaskedLanguage", "FewLabels"),
    "sum over pixels by number of objects, `sum_over`": Kind("declared.Objects", "FewLabels"),
    "padded RNN, summed in forward": Kind("sequences.PaddedSums", "Series"),
    "padded to the longest": Kind("sequences.OwnLongest", "Series"),
    "padded to `total_length`": Kind("sequences.TotalLength", "Series", "OwnData"),
    "lengths in a list": Kind("sequences.ListOfLengths", "Series"),
    "`PackedSequence` in and out": Kind(
        "sequences.Packed",
        "Series",
        "OwnData",
        settings=("trainer.strategy.whole_inputs=[packed]",),
    ),
    "time first": Kind("sequences.TimeFirst", "TimeFirst"),
    "time first, as long as the batch": Kind("sequences.TimeFirst", "TimeFirstAsLong"),
    "state from batch to batch": Kind("habits.Stateful", "Scans", "DropsLast"),
    "mask as long as the batch": Kind(
        "sequences.Attention", "Scans", settings=("trainer.strategy.whole_inputs=[mask]",)
    ),
    "graphs as lists": Kind("graphs.GraphLists", "GraphList"),
    "graphs as objects (PyG)": Kind(
        "graphs.GraphObjects", "GraphObjects", settings=("trainer.strategy.whole_inputs=[batch]",)
    ),
    "nodes": Kind("graphs.Nodes", "Graphs"),
    "nodes, `mean_over`": Kind("declared.Nodes", "Graphs", "OwnData"),
    "contrastive (InfoNCE)": Kind("comparing.Contrastive", "Views"),
    "contrastive, gathered (SimCLR)": Kind("comparing.GatheredNegatives", "Views"),
    "gathered, `drop_last`": Kind("comparing.GatheredNegatives", "Views", "DropsLast"),
    "queue written by forward (MoCo)": Kind("comparing.Queue", "Views"),
    "queue written by the step, gathered": Kind("comparing.QueueInStep", "Views"),
    "queue by the step, `drop_last`": Kind("comparing.QueueInStep", "Views", "DropsLast"),
    "queue changed before backward": Kind("comparing.ForgottenClone", "Views", "DropsLast"),
    "teacher with EMA": Kind("comparing.Teacher", "Views", "OwnData"),
    "GAN, manual": Kind(
        "several.Adversaries",
        settings=(
            "trainer.strategy.modules=[generator,discriminator]",
            "trainer.strategy.find_unused_parameters=true",
        ),
    ),
    "two optimizers, accumulated by hand": Kind("several.AccumulatesByHand", data="OwnData"),
    "SAM": Kind("several.SharpnessAware"),
    "LBFGS": Kind("several.Lbfgs"),
    "two tasks, two loaders": Kind("several.TwoTasks", data="TwoTasks"),
    "two validation loaders": Kind(
        "logged.TwoValidations",
        data="TwoValidations",
        words=("objective=val/loss/dataloader_idx_0", "mode=min"),
    ),
    "two validation loaders, one key": Kind("logged.OneKey", data="TwoValidations"),
    "collected in lists": Kind("logged.Collected"),
    "collected within epochs": Kind(
        "logged.Collected",
        words=(
            "trainer.val_check_interval=2",
            "trainer.num_sanity_val_steps=2",
            "trainer.limit_val_batches=3",
        ),
    ),
    "counted by hand": Kind("logged.Counters"),
    "counted in tensors, `sync_dist`": Kind("logged.CountersOfTensors", data="OwnData"),
    "counted by hand, `all_reduce`": Kind("logged.ReducedCounters"),
    "gathered in validation steps": Kind("logged.GatheredSteps"),
    "collected in a growing tensor": Kind("logged.GrowingTensor"),
    "collected in training": Kind("habits.EpochLoss"),
    "max, min and sum of steps": Kind("logged.Reductions"),
    "gathered by the author": Kind("logged.Gathered", words=("objective=val/auc", "mode=max")),
    "gathered as objects by the author": Kind(
        "logged.GatheredObjects", data="OwnData", words=("objective=val/auc", "mode=max")
    ),
    "root of a mean (RMSE)": Kind("whole_batch.RootMeanSquare"),
    "inner loop (MAML)": Kind(
        "whole_batch.InnerLoop", settings=("trainer.strategy.whole_inputs=[x]",)
    ),
    "term where a class is in the batch": Kind("whole_batch.OnlyWithClass"),
    "prototypes, kept by the step": Kind("whole_batch.Prototypes"),
    "bank in a list": Kind("whole_batch.Bank"),
    "baseline in a number (REINFORCE)": Kind("whole_batch.Baseline"),
}
