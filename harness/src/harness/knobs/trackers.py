"""Values for Lightning's loggers of W&B and MLflow: see the folder logger of the configs."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import Logger, MLFlowLogger, WandbLogger

from harness.errors import UserError

NO_REPORTS = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def run_name(run_dir: str) -> str:
    """Name a run in a tracker, under which it goes on there: ``default-2026-01-31_12-00-00``."""
    return "-".join(Path(run_dir).parts[-2:])


def mlflow_run_id(run_dir: str, experiment_name: str, tracking_uri: str) -> str | None:
    """Ask MLflow for the run that an earlier start has made, by its tag; ``None`` at the first."""
    try:
        from mlflow import MlflowClient
    except ModuleNotFoundError as error:
        raise UserError("logger=mlflow needs mlflow: pip install -e '.[mlflow]'.") from error
    client = MlflowClient(tracking_uri)
    experiment = client.get_experiment_by_name(experiment_name)
    if experiment is None:
        return None
    tag = f"tags.`harness_run` = '{run_name(run_dir)}'"  # MLflow gives runs ids of its own
    runs = client.search_runs([experiment.experiment_id], tag)
    return str(runs[0].info.run_id) if runs else None


def send_no_reports() -> None:
    """Keep trackers from reporting home, unless the environment lets them."""
    for name, value in NO_REPORTS.items():
        os.environ.setdefault(name, value)


def log_settings(loggers: Iterable[Logger], cfg: DictConfig) -> None:
    """Give trackers a run's whole config, at its first start: MLflow never changes a value."""
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    for logger in loggers:
        if isinstance(logger, (WandbLogger, MLFlowLogger)):
            logger.log_hyperparams(settings)
