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
    "gathered by the user": Kind("logged.Gathered", words=AUC),
    "gathered as objects by the user": Kind("logged.GatheredObjects", data="OwnData", words=AUC),
    "root of a mean (RMSE)": Kind("habits.RootMeanSquare"),
    "term where a class is in the batch": Kind("habits.OnlyWithClass"),
    "bank in a list": Kind("habits.Bank"),
}

MOVED = {  # outside the step, by samples of its own
    "centre moved by a hook (DINO)": Kind("rank_local.Centred"),
    "centre in a buffer, moved by a hook": Kind("rank_local.CentredBuffer"),
    "centre in a buffer, moved by the step": Kind("rank_local.CentredBufferInStep"),
    "prototypes moved by a hook": Kind("rank_local.Prototypes"),
    "thresholds of classes (FreeMatch)": Kind("rank_local.FreeMatch"),
    "running loss as a baseline": Kind("rank_local.Baseline"),
    "coefficient from an epoch's loss": Kind("rank_local.OfLastEpoch"),
    "tasks weighted by epochs' losses (DWA)": Kind("rank_local.DynamicWeights", data="OwnData"),
    "curriculum by a quantile of losses": Kind("rank_local.Curriculum"),
    "class weights from a validation": Kind("rank_local.WeightsFromValidation"),
    "`callback_metrics` read in a hook": Kind("rank_local.FromLoggedStep"),
}
BY_SAMPLE = {
    "soft labels by sample": Kind("tables.SoftLabels", "Numbered"),
    "early-learning regularisation (ELR)": Kind("tables.EarlyLearning", "Numbered"),
    "bank by sample, in a buffer": Kind("tables.InstanceBank", "Numbered"),
    "temporal ensembling": Kind("tables.TemporalEnsemble", "Numbered", "OwnData"),
    "losses by sample, in a dict": Kind("tables.LossHistory", "Numbered"),
    "forgetting events by sample": Kind("tables.Forgetting", "Numbered"),
}
DRAWN = {  # in hooks
    "factor drawn before each batch": Kind("hooks_that_draw.DrawnFactor"),
    "mask drawn for an epoch": Kind("hooks_that_draw.MaskOfEpoch"),
    "LayerDrop drawn before each batch": Kind("hooks_that_draw.LayerDrop"),
    "scheduled sampling drawn before each batch": Kind("hooks_that_draw.ScheduledSampling"),
    "mask ratio drawn for an epoch": Kind("hooks_that_draw.MaskRatio"),
    "temperature drawn after each batch": Kind("hooks_that_draw.DrawnAfterwards"),
    "projection drawn at the start": Kind("hooks_that_draw.DrawnProjection"),
    "width drawn by a callback": Kind("hooks_that_draw.Slimmable", data="OwnData"),
    "noise behind the transfer": Kind("hooks_that_draw.AugmentedOnDevice"),
}
LATE = {
    "contrastive from the third epoch": Kind("late.LateTerm"),
    "contrastive from a step within an epoch": Kind("late.LateTermWithinEpoch"),
    "contrastive for the last steps": Kind("late.TermAtTheEnd"),
    "comparing term, ramped up": Kind("late.RampedTerm"),
    "pairs pulled together, ramped up": Kind("late.RampedPairs"),
    "dropout from the second epoch": Kind("late.LateDropout"),
    "dropout from a step within an epoch": Kind("late.LateModuleDropout"),
    "noise from a step within an epoch": Kind("late.LateNoise"),
    "mixup in the second epoch": Kind("late.LateMixup"),
    "BatchNorm from the second epoch": Kind("late.LateBatchNorm"),
    "deferred class weights (LDAM)": Kind("late.DeferredWeights"),
    "hard examples after a warm-up": Kind("late.HardExamples"),
    "queue compared with once it is full": Kind("late.LateQueue"),
}
BACKWARD = {
    "spread of a batch added in `backward`": Kind("backward_hooks.ExtraInBackward"),
    "covariance added in `backward`": Kind("backward_hooks.CovarianceInBackward"),
    "sum added in `backward`": Kind("backward_hooks.SumInBackward"),
    "mean added in `backward`": Kind("backward_hooks.MeanInBackward"),
    "hook on the loss": Kind("backward_hooks.LossHook"),
    "gradients clamped in hooks": Kind("backward_hooks.ParameterHooks"),
    "gradients clipped by tensor in hooks": Kind("backward_hooks.ClippedTensors"),
    "gradients' signs in hooks": Kind("backward_hooks.SignedGradients"),
    "noise on gradients in hooks": Kind("backward_hooks.NoisyGradients"),
    "NaN replaced in hooks": Kind("backward_hooks.ZeroedNans"),
    "gradients clamped once accumulated": Kind("backward_hooks.PostAccumulate"),
    "gradients normalised once accumulated": Kind("backward_hooks.PostAccumulateNorm"),
    "hook on the outputs": Kind("backward_hooks.OutputHook"),
    "full backward hook": Kind("backward_hooks.ModuleHook"),
    "own function centres gradients": Kind("backward_hooks.OwnFunction"),
    "gradients clamped after backward": Kind("backward_hooks.AfterBackward"),
    "gradients clipped before the step": Kind("backward_hooks.BeforeStep"),
}
MOVED_BY_CALLS = {
    "calls counted by a forward hook": Kind("split_state.CountingHook"),
    **{
        name: Kind("split_state.WithPart", words=(f"+model.part={part}",))
        for name, part in {
            "layer annealed by its calls": "Annealed",
            "layer with a running size": "Observed",
            "layer with a running mean and deviation": "RunningMeanStd",
            "layer with a power iteration": "PowerIteration",
            "layer with a codebook (VQ)": "Codebook",
            "layer with a cache by length": "LengthCache",
        }.items()
    },
}
EVALUATED = {
    "evaluated by neighbours (k-NN)": Kind("evaluations.NearestNeighbours"),
    "evaluated by class means": Kind("evaluations.ClassMeans"),
    "evaluated by a probe in a callback": Kind("evaluations.Probed"),
    "adapted in validation (Tent)": Kind("evaluations.Adapted"),
    "evaluated by averaged weights in a dict": Kind("evaluations.AveragedWeights"),
    "evaluated by an averaged prior in a dict": Kind("evaluations.AveragedPrior"),
    "temperature from the validation before": Kind("evaluations.Calibrated"),
    "threshold moved by a hook": Kind("evaluations.Threshold"),
    "lowest loss of the batches so far": Kind("evaluations.BestSoFar"),
}
INNOCENT = {
    "logs zero but for rounding": Kind("innocent.LogsZero"),
    "logs what cancels": Kind("innocent.LogsCancelled"),
    "logs terms of weight zero": Kind("innocent.LogsGradientOfZero"),
    "dropout in a frozen part": Kind("innocent.FrozenDropout"),
    "dropout never called": Kind("innocent.DropoutForLater"),
    "dropout of zero": Kind("innocent.DropoutOfZero"),
    "dropout in a teacher": Kind("innocent.DropoutInTeacher"),
    "attributes named drop": Kind("innocent.NamedDrop"),
    "schedule named dropout": Kind("innocent.DropSchedule"),
    "loader read in a step": Kind("innocent.ReplaysLoader"),
    "loader made and read in a step": Kind("innocent.ReplaysAll"),
    "metric computed in a step": Kind("innocent.ComputesMetric"),
    "metrics called in a step": Kind("innocent.CalledMetric"),
    "clock of a step": Kind("innocent.Clock"),
    "clock between steps": Kind("innocent.ClockBetween"),
    "logs in forward": Kind("innocent.LogsInForward"),
    "logs counters": Kind("innocent.LogsCounters"),
    "chunks by hand": Kind("innocent.Chunks"),
    "sample by sample": Kind("innocent.SampleBySample"),
    "chunks by hand, manual": Kind("innocent.ChunksByHand"),
    "draws what it shows": Kind("innocent.ShowsOne"),
    "mask of a fixed seed": Kind("innocent.FixedNoise"),
    "decay in the loss": Kind("innocent.DecayInLoss"),
    "gathers what it logs": Kind("innocent.GathersToLog"),
    "prints a running loss": Kind("innocent.RunningLoss"),
}
# Kinds that the parity check must find, and kinds that it must not report.
OF_PARITY = {
    **(MOVED | BY_SAMPLE | DRAWN | LATE),
    **(BACKWARD | MOVED_BY_CALLS | EVALUATED | INNOCENT),
}
