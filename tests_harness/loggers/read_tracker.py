"""What a tracker has of the only run of a project, as JSON: ``python read_tracker.py <tracker>
<output_dir> <run folder> <project>``.

A program of its own: the libraries' warnings are no errors here, and Trackio has one store for each
process.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def wandb(out: Path, run_dir: Path, project: str) -> Found:
    """By W&B's own reader of what is offline."""
    folders = list((run_dir / "wandb").glob("offline-run-*"))
    words = [sys.executable, "-m", "wandb", "beta", "leet", "inspect", "--json", folders[0]]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    points, pictures = defaultdict(list), []
    for item in [record["history"]["item"] for record in records if record["type"] == "history"]:
        step = item.pop("trainer/global_step")
        pictures += [name[:-6] for name in item if name.endswith("._type")]
        for name in item.keys() - {"trainer/row"}:
            if not name.startswith("_") and "." not in name:
                points[name].append([step, float(item[name])])
    run = next(record["run"] for record in records if record["type"] == "run")
    return {
        "num_runs": len(folders),
        "id": run["run_id"],
        "points": points,
        "pictures": pictures,
        "config": run["config"]["update"],
        "tags": run["tags"],
        "notes": run["notes"],
        "num_models": sum("artifact" in record["type"] for record in records),
    }


def mlflow(out: Path, run_dir: Path, project: str) -> Found:
    """By MLflow's client, also runs that were deleted."""
    import yaml
    from mlflow import MlflowClient
    from mlflow.entities import ViewType

    client = MlflowClient(f"sqlite:///{out}/mlflow.db")
    experiment = client.get_experiment_by_name(project)
    runs = client.search_runs([experiment.experiment_id], run_view_type=ViewType.ALL)
    run = runs[0]
    points = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        points[name] = [[point.step, point.value] for point in history]
    files = client.list_artifacts(run.info.run_id, "pictures/test")
    place = client.download_artifacts(run.info.run_id, "settings.yaml")
    return {
        "num_runs": len(runs),
        "id": run.data.tags["harness.run"],
        "points": points,
        "pictures": [file.path.removeprefix("pictures/").rpartition("_")[0] for file in files],
        "config": yaml.safe_load(Path(place).read_text()),
        "tags": [name for name, value in run.data.tags.items() if value == "true"],
        "notes": run.data.tags["mlflow.note.content"],
        "num_models": len(client.list_artifacts(run.info.run_id, "model")),
        "status": run.info.status,
    }


def trackio(out: Path, run_dir: Path, project: str) -> Found:
    """By Trackio's store."""
    os.environ["TRACKIO_DIR"] = str(out / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_run_records(project)
    name, run_id = runs[0]["name"], runs[0]["id"]
    points, pictures = defaultdict(list), []
    for row in SQLiteStorage.get_logs(project, name, run_id=run_id):
        step = row.pop("step")
        for key in row.keys() - {"timestamp"}:
            if isinstance(row[key], dict):
                assert (out / "trackio" / "media" / row[key]["file_path"]).exists()
                pictures.append(key)
            else:
                points[key].append([step, float(row[key])])
    config = SQLiteStorage.get_run_config(project, name, run_id=run_id)
    return {
        "num_runs": len(runs),
        "id": run_id,
        "points": points,
        "pictures": pictures,
        "config": config,
        "tags": config["tags"],
        "notes": config["notes"],
        "num_models": len(list((out / "trackio" / "artifacts").rglob("*"))),
    }


if __name__ == "__main__":
    tracker, out, run_dir, project = sys.argv[1:]
    found = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}[tracker](
        Path(out), Path(run_dir), project
    )
    print(json.dumps(found))
