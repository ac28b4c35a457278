"""The runs of a k-fold as one result: a table of their tests, and one prediction for each sample.

Each run has trained without its fold, and has tested on it. Its best checkpoint predicts the fold's
samples here, after the training, so that runs may have been resumed or started one by one.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from harness.command import run_folder
from harness.errors import UserError
from harness.files import write_durably
from harness.names import flat, is_below

if TYPE_CHECKING:
    import polars as pl

PREDICTIONS = "out_of_fold.csv"
OF_SEED = "out_of_fold_seed{}.csv"  # where there are several
# What may differ between the folds, beside what may change where a run goes on.
OF_A_RUN = ("data.fold", "name", "output_dir", "run_dir", "resume", "logger", "callbacks")


def join(folders: Sequence[str | Path], conf: str | Path = "conf") -> str:
    """Predict each sample by the fold that has not seen it, and write ``out_of_fold.csv``.

    The file goes into the folder that is given, or beside the first of several. It has a row for
    each sample in the data's order: ``sample``, ``fold``, and the columns of ``predict_step``.

    Args:
        folders: of a sweep, or of each fold's run. Folds of several seeds are joined by seed, into
            ``out_of_fold_seed<seed>.csv``.
        conf: the folder of the config files.

    Returns:
        A table of what the folds have reached.

    Raises:
        UserError: if a fold is missing, unfinished or twice there, or they differ in settings.
    """
    runs = found_runs([Path(folder) for folder in folders])
    configs = {run: run_folder.resolved(run_folder.load_config(run)) for run in runs}
    place = Path(folders[0]) if len(folders) == 1 else Path(folders[0]).resolve().parent
    by_seed: dict[int, dict[Path, DictConfig]] = {}
    for run, cfg in configs.items():
        by_seed.setdefault(cfg.seed, {})[run] = cfg
    if len(by_seed) == 1:
        return _joined_runs(configs, place / PREDICTIONS, Path(conf))
    return "\n".join(
        f"seed {seed}\n{_joined_runs(some, place / OF_SEED.format(seed), Path(conf))}"
        for seed, some in sorted(by_seed.items())
    )


def _joined_runs(configs: dict[Path, DictConfig], path: Path, conf: Path) -> str:
    """The table of one k-fold, whose predictions are written."""
    folds = ordered(configs)
    check_settings({run: configs[run] for run in folds}, conf)
    shown = table([run_folder.results(run) for run in folds])
    predictions = [predicted(run, configs[run], conf) for run in folds]
    whole = joined(predictions, folds)
    write_durably(path, whole.write_csv().encode())
    return f"{shown}\n{len(whole):,} predictions, each by the fold that tested it: {path}"


def found_runs(folders: Sequence[Path]) -> list[Path]:
    """The folders of runs, among those given and what is in them."""
    runs: list[Path] = []
    for folder in folders:
        if (folder / "config.yaml").is_file():
            found = [folder]
        else:
            found = sorted(path.parent for path in folder.glob("*/config.yaml"))
        if not found:
            raise UserError(f"{folder} holds no run: give a sweep's folder, or the folds' folders.")
        runs += [run.resolve() for run in found]
    return runs


def ordered(configs: dict[Path, DictConfig]) -> list[Path]:
    """The runs in the order of their folds.

    Raises:
        UserError: if they are not each fold once, finished.
    """
    by_fold: dict[int, Path] = {}
    for run, cfg in configs.items():
        fold = OmegaConf.select(cfg, "data.fold")
        if fold is None:
            raise UserError(f"{run} is no fold: it was trained with data.fold=null.")
        if fold in by_fold:
            raise UserError(
                f"Fold {fold} is there twice: {by_fold[fold]}\nand {run}.\nName one run of each."
            )
        by_fold[fold] = run
    num_folds = max(OmegaConf.select(cfg, "data.num_folds") for cfg in configs.values())
    if missing := [str(fold) for fold in range(num_folds) if fold not in by_fold]:
        raise UserError(
            f"Of {num_folds} folds there is no {', '.join(missing)}.\n"
            f"Train with the same settings and data.fold={missing[0]}, and name the folders of all."
        )
    for fold, run in by_fold.items():
        if not run_folder.results(run):
            raise UserError(
                f"Fold {fold} has not finished.\nLet it go on: python train.py resume={run}"
            )
    return [by_fold[fold] for fold in range(num_folds)]


def check_settings(configs: dict[Path, DictConfig], conf: Path) -> None:
    """Refuse folds that were not trained alike."""
    rules: Any = OmegaConf.load(conf / "rules.yaml")
    may_differ = (*OF_A_RUN, *rules.get("may_change", ()))

    def settings(cfg: DictConfig) -> dict[str, Any]:
        whole: Any = OmegaConf.to_container(cfg)
        return {k: value for k, value in flat(whole).items() if not is_below(k, may_differ)}

    first, *others = configs
    known = settings(configs[first])
    for run in others:
        found = settings(configs[run])
        for key in sorted({*known, *found}):
            if known.get(key) != found.get(key):
                raise UserError(
                    f"Folds of one setting belong together: {key}={known.get(key)} in {first},\n"
                    f"and {found.get(key)} in {run}.\n"
                    "Give the folders of folds that differ in data.fold alone."
                )


def table(results: Sequence[dict[str, float]]) -> str:
    """What each fold has reached in its test, their mean and their standard deviation."""
    names = [name for name in results[0] if name.startswith("test/")]
    lines = [["fold", *names]]
    lines += [[str(i), *(f"{found[n]:.4g}" for n in names)] for i, found in enumerate(results)]
    columns = [[found[name] for found in results] for name in names]
    lines.append(["mean", *(f"{statistics.fmean(column):.4g}" for column in columns)])
    lines.append(["deviation", *(f"{statistics.stdev(column):.4g}" for column in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def predicted(run: Path, cfg: DictConfig, conf: Path) -> "pl.DataFrame":
    """A fold's predictions, with the place of each sample in all of the data."""
    import polars as pl

    from harness.command.from_python import predict
    from harness.data import facts
    from harness.run.making import make

    data = make(cfg.data)
    facts.hand_over(data, run)
    if not hasattr(data, "split_rows"):
        raise UserError(
            f"{type(data).__name__} does not say which samples a split has: give it split_rows, a "
            'dict whose "test" holds their positions.'
        )
    rows = {split: list(map(int, positions)) for split, positions in data.split_rows.items()}
    words = [f"output={run / 'predictions.csv'}", "trainer.enable_progress_bar=false"]
    # The fold's rows, and no new ones.
    words += [f"data.{key}=null" for key in cfg.data if str(key).startswith("predict_")]
    path = predict(run_folder.best_checkpoint(run), *words, conf=conf)
    found = pl.read_csv(path, infer_schema=False)
    if found.height != len(rows["test"]):
        raise UserError(
            f"{run} has predicted {found.height:,} samples, and its fold has {len(rows['test']):,}."
        )
    places = pl.Series("sample", rows["test"])[found["sample"].cast(pl.Int64)]
    fold = pl.lit(cfg.data.fold).alias("fold")
    return found.select(places, fold, pl.exclude("sample"))


def joined(predictions: Sequence["pl.DataFrame"], runs: Sequence[Path]) -> "pl.DataFrame":
    """All predictions in the data's order.

    Raises:
        UserError: if a sample is in several folds, as where the data have changed in between.
    """
    import polars as pl

    whole = pl.concat(predictions, how="diagonal").sort("sample")
    if doubled := whole.filter(pl.col("sample").is_duplicated()).rows(named=True):
        sample, folds = doubled[0]["sample"], [row["fold"] for row in doubled[:2]]
        raise UserError(
            f"Sample {sample} is in folds {folds[0]} and {folds[1]}: the data have changed between "
            f"{runs[folds[0]]} and {runs[folds[1]]}."
        )
    return whole
