"""A run is made again from what it has kept; what it lacks is named, each in a line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from harness import UserError, code_version, record
from harness.reproduce import equality, missing
from harness.reproduce.command import reproduce
from harness.run.provenance import PACKAGES
from harness.runs import reading
from tests_harness.reproduce.project import Project

OLDER = Path(__file__).parents[1] / "runs" / "before_two_rooms"
WORDS = ["experiment=table", "data.file=rows.csv", "data.target=y", "trainer.max_epochs=2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project.copied(tmp_path_factory.mktemp("project"))
    rows = np.random.default_rng(1).normal(size=(300, 4))
    np.savetxt(
        project.folder / "rows.csv", rows, delimiter=",", header="a,b,c,y", comments="", fmt="%.6f"
    )
    return project


@pytest.fixture(scope="module")
def trained(project: Project) -> Path:
    """Trained with code that was not committed, and that is another one since."""
    model = project.source("models/table_mlp.py")
    untracked = model.with_name("untracked.py")
    untracked.write_text("HERE = 1\n")
    imported = f"from {model.parents[1].name}.models.untracked import HERE"
    project.append("models/table_mlp.py", imported)
    run_dir = project.train("dirty", *WORDS)
    project.append("models/table_mlp.py", "raise RuntimeError('of today')")
    untracked.unlink()
    (project.folder / "conf" / "train.yaml").write_text("no: [config")
    return run_dir


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """The run in another folder, to be damaged."""
    return Path(
        shutil.copytree(
            trained,
            tmp_path / "copy",
            symlinks=True,
            ignore=shutil.ignore_patterns("reproduced"),
        )
    )


def found(folder: Path) -> missing.Findings:
    run = reading.read(folder)
    return missing.look(run, missing.start_place(run), has_environment=False)


def test_a_run_notes_what_made_it(trained: Path) -> None:
    noted = record.read(trained)
    (start,) = noted["starts"]
    assert start["is_dirty"]
    assert "+from" in (trained / record.DIFF).read_text()
    assert start["torch"] == torch.__version__
    assert start["num_threads"] >= 1
    assert start["num_processes"] == 1
    assert noted["data"]["files"]["data.file"]["path"] == "rows.csv"
    assert all(noted["data"][split][0] for split in ("train", "val", "test"))
    packages = missing.versions_in((trained / PACKAGES).read_text())
    assert packages["torch"] == code_version.installed_versions(["torch"])["torch"]


def test_a_run_is_made_again_by_its_own_code_whatever_there_is_today(
    project: Project, trained: Path
) -> None:
    result = project.reproduce(trained)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "reproduced: equal by bit" in result.stdout
    assert "NOT EQUAL" not in result.stdout
    (again,) = (trained / "reproduced").iterdir()
    (before,), (now,) = ([*(d / "code").glob("*.zip")] for d in (trained, again / "run"))
    one, other = code_version.load(before), code_version.load(now)
    assert one is not None
    assert other is not None
    assert not code_version.differences(one, other)
    assert any(name.endswith("models/untracked.py") for name in other.sources)
    assert (again / "code" / "conf" / "train.yaml").read_text().startswith("# One run")
    assert len(reading.find([project.folder / "outputs"])) == 1  # it is no further run


def test_kept_sources_suffice_without_a_repository(
    project: Project, copy: Path, tmp_path: Path
) -> None:
    """As on another machine: only the data came along."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    shutil.copy(project.folder / "rows.csv", place)
    record.note_start(copy, started_in="/nowhere")
    result = project.reproduce(copy, "--output", tmp_path / "again", cwd=place)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "which no repository here has" in result.stdout
    assert not (tmp_path / "again" / "code" / "conf").exists()


def test_other_data_in_a_file_are_named_before_anything_is_made(
    project: Project, trained: Path
) -> None:
    path = project.folder / "rows.csv"
    before = path.read_bytes()
    try:
        path.write_bytes(before.replace(b"0", b"1", 1))
        (line,) = found(trained).missing
        assert line.startswith("data.file=rows.csv: ")
        assert "holds other data than then" in line
        path.unlink()
        (line,) = found(trained).missing
        assert "there is no" in line
    finally:
        path.write_bytes(before)
    assert not found(trained).missing


def test_other_samples_end_a_run_that_is_made_again(project: Project, copy: Path) -> None:
    """Such as those of a folder of images, which are known when they are read."""
    record.note(copy, data={**record.read(copy)["data"], "train": [1]})
    result = project.reproduce(copy)
    assert result.returncode == 1
    assert "missing  its data: those of train hold something else" in result.stderr


def test_packages_of_other_versions_are_named(copy: Path) -> None:
    (path,) = (copy / "code").glob("*.zip")
    code = code_version.load(path)
    assert code is not None
    replace(code, versions=code.versions | {"numpy": "1.0", "horses": "2.0"}).save(path)
    text = (copy / PACKAGES).read_text()
    (copy / PACKAGES).write_text(text + "foals==3.0\n")
    told = found(copy).differing
    assert "horses 2.0 -> not installed" in told
    assert f"numpy 1.0 -> {np.__version__}" in told
    assert "packages that it does not import itself: foals 3.0 -> not installed" in told


def test_the_same_packages_are_not_named(copy: Path) -> None:
    assert found(copy).differing == []


def test_another_machine_is_named(copy: Path) -> None:
    record.note_start(copy, processor="Abacus", gpus=["NVIDIA Horse"])
    told = found(copy).differing
    assert any(line.startswith("CPU Abacus -> ") for line in told)
    assert "GPUs NVIDIA Horse -> none" in told
    assert any("trainer.deterministic" in line for line in told)


def test_a_run_without_kept_code_says_what_it_was_made_with(copy: Path) -> None:
    shutil.rmtree(copy / "code")
    (line,) = found(copy).missing
    assert "its code, of which an older version" in line
    assert f"check out {record.read(copy)['commit']} and train with" in line
    assert "experiment=table" in line
    older = found(OLDER)
    assert any("its code" in line for line in older.missing)
    assert any("older version notes nothing" in line for line in older.differing)


def test_code_that_has_changed_within_a_run_is_named(copy: Path) -> None:
    (path,) = (copy / "code").glob("*.zip")
    code = code_version.load(path)
    assert code is not None
    name = next(name for name in code.sources if name.endswith("table_mlp.py"))
    other = {**code.sources, name: code.sources[name] + b"\nWIDTH = 2\n"}
    replace(code, sources=other).save(path.with_name("step_5.zip"))
    (line,) = found(copy).missing
    assert line == f"one code: {name} changed at step 5; no single code gives this run"
    (path.with_name("step_5.zip")).write_bytes(b"damaged")
    assert any("is damaged" in line for line in found(copy).missing)


def test_a_run_that_changed_its_course_is_named(copy: Path) -> None:
    start = record.read(copy)["starts"][0]
    first = {**start, "num_processes": 4, "limits": [1, -1]}
    record.note(copy, starts=[first, start])
    told = found(copy).differing
    assert "of its own starts: processes 4 -> 1" in told
    assert any("more epochs or steps" in line for line in told)


def test_what_is_missing_is_told_in_lines_and_nothing_is_made(copy: Path) -> None:
    (copy / "results.json").unlink()
    shutil.rmtree(copy / "code")
    with pytest.raises(UserError, match=r"cannot be made again\.\n  missing  its end: it is stop"):
        reproduce(reading.read(copy))
    assert not (copy / "reproduced").exists()


def test_an_edited_config_and_a_folder_in_use_are_refused(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(UserError, match="is not empty"):
        reproduce(reading.read(copy), tmp_path / "mine")
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("\nseed: 1\n", "\nseed: 2\n"))
    with pytest.raises(UserError, match="damaged, or edited"):
        reproduce(reading.read(copy))
    assert not (copy / "reproduced").exists()


def test_packages_that_cannot_be_installed_are_told(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (copy / PACKAGES).write_text("horses==1.0\n")
    with pytest.raises(UserError, match=r"packages.txt cannot be installed: ERROR: .*horses==1.0"):
        reproduce(reading.read(copy), tmp_path / "again", has_environment=True)
    assert not (tmp_path / "again").exists()
    (copy / PACKAGES).unlink()
    with pytest.raises(UserError, match="older versions do not write: no --environment"):
        reproduce(reading.read(copy), tmp_path / "again", has_environment=True)


def test_a_difference_is_told_with_its_place_and_its_size(trained: Path, copy: Path) -> None:
    assert all(file.is_equal for file in equality.compare(trained, copy))
    path = copy / "checkpoints" / "best.ckpt"
    saved = torch.load(path, weights_only=True)
    name = next(iter(saved["state_dict"]))
    saved["state_dict"][name].view(-1)[0] += 0.5
    path.unlink()  # a link to another one's
    torch.save(saved, path)
    results = json.loads((copy / "results.json").read_text())
    (copy / "results.json").write_text(json.dumps(results | {"test/loss": 2.0}))
    table = (copy / "metrics.csv").read_text().splitlines()
    (copy / "metrics.csv").write_text("\n".join([*table[:-1], table[-1] + "9"]) + "\n")
    weights, last, metrics, reached = equality.compare(trained, copy)
    assert "differ by at most 0.5, in " in weights.said
    assert last.is_equal
    assert "differ first at step" in metrics.said
    assert "differ in test/loss" in reached.said
    (copy / "metrics.csv").unlink()
    files = {file.name: file for file in equality.compare(trained, copy)}
    assert files["metrics.csv"].said == "the run that was made again has none"
    assert not files["metrics.csv"].is_equal


def test_timings_are_not_compared(tmp_path: Path) -> None:
    for name, speed in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        text = f"step,throughput/samples,train/loss\n1,{speed},0.5\n"
        (tmp_path / name / "metrics.csv").write_text(text)
    (metrics,) = equality.compare(tmp_path / "a", tmp_path / "b")
    assert metrics.is_equal


def test_a_tensor_with_a_gap_equals_itself() -> None:
    one, two = torch.tensor([1.0, float("nan")]), torch.tensor([2.0, float("nan")])
    assert equality.differences({"x": one}, {"x": one.clone()}) == []
    assert equality.differences({"x": one}, {"x": two}) == ["/x"]
    assert equality.differences({"x": one}, {"x": one.nan_to_num(0.0)}) == ["/x"]
