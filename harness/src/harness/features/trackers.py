"""Values that the configs in ``logger/`` give to Lightning's loggers of W&B and MLflow."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import Logger, MLFlowLogger, WandbLogger

from harness.errors import UserError

NO_REPORTS = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def run_name(run_dir: str) -> str:
    """Return a run's name in a tracker, such as ``default-2026-01-31_12-00-00``.

    A resumed run has the same name, so the tracker continues it.
    """
    return "-".join(Path(run_dir).parts[-2:])


def mlflow_run_id(run_dir: str, experiment_name: str, tracking_uri: str) -> str | None:
    """Return MLflow's id of the run that an earlier start created; ``None`` at the first start.

    Raises:
        UserError: MLflow is not installed.
    """
    try:
        from mlflow import MlflowClient
    except ModuleNotFoundError as error:
        raise UserError("logger=mlflow needs mlflow: pip install -e '.[mlflow]'.") from error
    client = MlflowClient(tracking_uri)
    experiment = client.get_experiment_by_name(experiment_name)
    if experiment is None:
        return None
    tag = f"tags.`harness_run` = '{run_name(run_dir)}'"  # MLflow chooses the run's id itself
    runs = client.search_runs([experiment.experiment_id], tag)
    return str(runs[0].info.run_id) if runs else None


def send_no_reports() -> None:
    """Switch off the trackers' telemetry, unless the user has set its environment variable."""
    for name, value in NO_REPORTS.items():
        os.environ.setdefault(name, value)


def log_settings(loggers: Iterable[Logger], cfg: DictConfig) -> None:
    """Log a run's full config to W&B and MLflow.

    Call it only at the first start: MLflow refuses to change a value.
    """
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    for logger in loggers:
        if isinstance(logger, (WandbLogger, MLFlowLogger)):
            logger.log_hyperparams(settings)
