"""A mistake in a command gets one or two lines that say what to type, and leaves nothing behind."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from harness.command import start as cli
from harness.command import yaml_files
from harness.command.compose import compose_command
from harness.errors import UserError
from harness.processes import leaving, peers
from harness.testing import command as typed
from tests_harness.conftest import ROOT
from tests_harness.faults.fork_server import command

MISTAKES = {
    "unknown key": ("trainer.devcies=2", "Did you mean trainer.devices?"),
    "unknown key elsewhere": ("lr=0.1", "Did you mean model.optimizer.lr?"),
    "misspelled group": ("stratgy=ddp", "Did you mean strategy?"),
    "unknown choice": ("model=cnnn", "Did you mean model=cnn?"),
    "unknown experiment": ("experiment=syntetic", "Did you mean experiment=synthetic?"),
    "empty choice": ("data=", "table, text."),
    "choice with a plus": ("+strategy=ddp", "write strategy=<choice>"),
    "not key=value": ("strategy", "not of the form key=value"),
    "unquoted text": ("name=cnn(2)", "'name=\"cnn(2)\"'"),
    "text for a number": ("data.batch_size=many", "data.batch_size takes a number"),
    "no value": ("data.batch_size=", "data.batch_size takes a number"),
    "the run's own folder": ("run_dir=here", "use output_dir="),
    "Hydra's folder": ("hydra.run.dir=here", "give output_dir=<folder> and name=<name>"),
    "a key of a file that is not chosen": (
        "callbacks.ema.decay=0.9",
        "There is no key callbacks.ema without callbacks=ema: add that.",
    ),
    "number with a fraction": ("data.batch_size=1.5", "must be a whole number, 1 or more"),
    "nothing for a number": ("data.batch_size=null", "must be a whole number, 1 or more"),
    "seed too large": ("seed=99999999999", "smaller than 2^32"),
    "unknown pinning": ("data.pin_memory=maybe", "true, false or auto"),
    "no devices": ("trainer.devices=0", "a number from 1"),
    "unknown accelerator": ("trainer.accelerator=tpu", "cpu, gpu, cuda or mps"),
    "no strategy": ("~strategy", "Leave out ~strategy"),
    "no trainer": ("~trainer", "Leave out ~trainer"),
    "no gpus": ("~gpus", "Leave out ~gpus"),
    "rules as a word": ("rules=null", "there are those of conf/rules.yaml alone"),
    "interpolated fact": ("model.num_classes=${from_data.num_classes}", "write from_data.num_cl"),
    "empty strategy": ("strategy=null", "there is no conf/strategy/null.yaml"),
    "truth value for a choice": ("model=true", "there is no conf/model/true.yaml"),
    "name outside": ("name=../x", "without '..'"),
    "Lightning 1, added": ("+num_gpus=2", "trainer.devices="),
    "machines that nobody starts": ("strategy=ddp trainer.num_nodes=2", "torchrun --nnodes=2"),
    "dp on two machines": ("strategy=dp trainer.num_nodes=2", "Use strategy=ddp2"),
    "batch smaller than the processes": (
        "strategy=ddp trainer.devices=2 data.batch_size=1",
        "Use data.batch_size=2 or more",
    ),
    "batch size of zero": ("data.batch_size=0", "must be a whole number, 1 or more"),
    "negative workers": ("data.num_workers=-1", "must be a whole number, 0 or more"),
    "text for a truth value": ("test=perhaps", "test takes true or false"),
    "unknown interpolation": ("seed=${nope}", "nope"),
    "one checkpoint kept": ("checkpoint.num_kept=1", "must be a whole number, 2 or more"),
    "no GPU": ("strategy=gpu", "strategy=cpu"),
    "one of a list": ("callbacks=[early_stoping]", "Did you mean callbacks=early_stopping?"),
    "choices of a list": ("callbacks=[early_stoping]", "Choices: early_stopping, ema, top_k."),
    "a list without brackets": ("callbacks=early_stopping,ema", "callbacks=[early_stopping,ema]"),
    "a choice inside of another": ("scheduler=cosine", "Did you mean model/scheduler=<choice>?"),
    "unknown schedule": ("model/scheduler=cosin", "Did you mean model/scheduler=cosine?"),
    "one tag": ("tags=lr", "use tags=[baseline,lr]"),
    "notes that are a list": ("notes=[a]", "is no text"),
    "unknown switch": ("compile=maybe", "compile takes true or false"),
    "nothing for a switch": ("channels_last=null", "use true or false"),
    "a number for a switch": ("tf32=19", "use null, true or false"),
    "the fastest and the same kernels": (
        "trainer.benchmark=true trainer.deterministic=true",
        "Leave out one of them",
    ),
    "clipping with a fused optimizer": (
        "trainer.gradient_clip_val=1 trainer.precision=16-mixed",
        "Add model.optimizer.fused=false",
    ),
    "more GPUs than there are": ("strategy=gpu trainer.devices=64", "strategy=cpu"),
    "no GPU to choose": ("gpus=emptiest", "eave out gpus=emptiest"),
    "GPUs that are named and chosen": (
        "gpus=emptiest trainer.devices=[0,1]",
        "Use trainer.devices=2",
    ),
    "GPUs chosen for the CPU": ("gpus=emptiest strategy=cpu", "Leave out one of them"),
    "least memory of GPUs that are not chosen": ("gpus.min_free_gib=20", "by gpus=emptiest"),
    "negative memory": ("gpus=emptiest gpus.min_free_gib=-1", "0 or more"),
    "unknown order of GPUs": ("gpus.order=fastest", "use visible or emptiest"),
    "Lightning 1: gpus": ("gpus=2", "strategy=ddp trainer.devices=<number of GPUs>"),
    "Lightning 1: a list of gpus": ("gpus=[0,1]", "strategy=ddp trainer.devices="),
    "Lightning 1: gpus, added": ("+gpus=2", "strategy=ddp trainer.devices="),
    "Lightning 1: trainer.gpus": ("trainer.gpus=2", "strategy=ddp trainer.devices="),
    "Lightning 1: backend": ("distributed_backend=ddp", "Use strategy="),
    "Lightning 1: accelerator": ("accelerator=ddp", "Use strategy=cpu or strategy=gpu"),
    "Lightning 1: trainer.accelerator": ("trainer.accelerator=ddp", "Use strategy=ddp"),
    "Lightning 1: ddp_cpu": ("strategy=ddp_cpu", "Use strategy=ddp"),
}

# These are found once the framework is there to ask.
LATE_MISTAKES = {
    "typo in a class": (
        "model=cnn model.net._target_=project.models.cnn.CNNN",
        "Did you mean project.models.cnn.CNN?",
    ),
    "typo in a module": (
        "model=cnn model.net._target_=project.models.cn.CNN",
        "There is no module project.models.cn",
    ),
    "argument that a class lacks": ("+model.net.depth=3", "has no argument depth"),
    "argument of the optimizer": ("+model.optimizer.lrr=3", "Did you mean lr?"),
    "value that the optimizer refuses": ("model.optimizer.lr=-1", "Invalid learning rate"),
    "value that a class refuses": ("model=cnn model.net.num_groups=7", "divisible by num_groups"),
    "value that the Trainer refuses": ("trainer.precision=8", "Precision"),
}


def expect_refusal(arguments: list[str], hint: str, folder: Path) -> None:
    result = command(*arguments, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 1
    assert hint in result.stderr
    assert "Traceback" not in result.stderr
    message = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(message) <= 2, result.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_explained(name: str, tmp_path: Path) -> None:
    overrides, hint = MISTAKES[name]
    expect_refusal(["train.py", f"output_dir={tmp_path}", *overrides.split()], hint, tmp_path)


@pytest.mark.parametrize("name", LATE_MISTAKES)
def test_mistake_that_needs_the_framework_is_explained(name: str, tmp_path: Path) -> None:
    overrides, hint = LATE_MISTAKES[name]
    expect_refusal(["train.py", f"output_dir={tmp_path}", *overrides.split()], hint, tmp_path)


def test_output_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = command("train.py", f"output_dir={tmp_path / 'file'}")
    assert result.returncode == 1
    assert "output_dir=<folder>" in result.stderr


@pytest.mark.parametrize("script", ["evaluate.py", "predict.py"])
def test_missing_checkpoint_is_explained(script: str) -> None:
    assert "Add checkpoint=" in command(script).stderr
    assert "no such file" in command(script, "checkpoint=nope.ckpt").stderr


def test_checkpoint_outside_of_its_run_is_explained(tmp_path: Path) -> None:
    (tmp_path / "best.ckpt").touch()
    result = command("evaluate.py", f"checkpoint={tmp_path / 'best.ckpt'}")
    assert result.returncode == 1
    assert "Keep a checkpoint in the checkpoints/ folder of its run" in result.stderr


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_checkpoint_is_refused(damage: str, finished_run: Path) -> None:
    """``torch.load`` would take the flipped bit for a weight."""
    data = bytearray((finished_run / "checkpoints" / "best.ckpt").read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    path = finished_run / "checkpoints" / f"{damage}.ckpt"
    path.write_bytes(data)
    result = command("evaluate.py", f"checkpoint={path}")
    path.unlink()
    assert result.returncode == 1
    assert "Use another checkpoint of the run" in result.stderr
    assert not (finished_run / "evaluate").exists()


def test_checkpoint_of_another_network_is_refused(finished_run: Path) -> None:
    checkpoint = finished_run / "checkpoints" / "best.ckpt"
    result = command("evaluate.py", f"checkpoint={checkpoint}", "model.net.hidden=[8]")
    assert result.returncode == 1
    assert "does not fit the model" in result.stderr
    assert "Traceback" not in result.stderr


def test_mistake_in_a_sweep_leaves_nothing(tmp_path: Path) -> None:
    result = command("train.py", "-m", "trainer.devcies=1,2", f"output_dir={tmp_path / 'out'}")
    assert "Did you mean trainer.devices?" in result.stderr
    assert not list(tmp_path.glob("out/**/*.yaml"))


@pytest.mark.parametrize(
    ("started", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "torchrun"),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_TASKS_PER_NODE": "2"}, "srun"),
    ],
)
@pytest.mark.parametrize("flag", ["-m", "hydra.mode=MULTIRUN"])
def test_sweep_in_processes_of_a_launcher_is_refused(
    flag: str, started: dict[str, str], launcher: str, tmp_path: Path
) -> None:
    """Each of them would name its own folder, and wait for the others for ever."""
    words = [flag, "seed=1,2", f"output_dir={tmp_path}"]
    result = command("train.py", *words, environment=started)
    assert result.returncode == 1
    said = f"{launcher} has started 2 processes, and each would run the whole sweep"
    assert result.stderr.startswith(said)
    assert result.stderr.rstrip().endswith(f"{tmp_path} strategy=ddp trainer.devices=2")
    assert not list(tmp_path.iterdir())


def test_sweep_over_several_machines_is_refused(tmp_path: Path) -> None:
    by_hand = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    words = ["strategy=ddp", "trainer.num_nodes=2", f"output_dir={tmp_path}"]
    result = command("train.py", "-m", "seed=1,2", *words, environment=by_hand)
    assert result.returncode == 1
    assert "Use trainer.num_nodes=1." in result.stderr
    assert not list(tmp_path.iterdir())


def test_processes_that_would_each_train_alone_are_refused(tmp_path: Path) -> None:
    result = command(
        *("-m", "torch.distributed.run", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "train.py"),
        f"output_dir={tmp_path}",
    )
    assert (
        "torchrun has started 2 processes, and with this strategy each would train alone"
        in result.stderr
    )


def test_answers_do_not_import_torch(tmp_path: Path) -> None:
    """``--help``, ``--cfg job`` and mistakes answer at once."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    blocked = {"PYTHONPATH": str(tmp_path)}
    for arguments in (["--help"], ["--cfg", "job"], ["-sc", "query=bash"]):
        result = typed("train.py", *arguments, environment=blocked | {"COMP_LINE": "train.py "})
        assert result.returncode == 0, result.stderr
    assert "Did you mean" in typed("train.py", "trainer.devcies=2", environment=blocked).stderr
    # The block works: a run does import torch.
    assert "torch was imported" in typed("train.py", environment=blocked).stderr


def test_mistake_of_one_rank_only_is_told_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of all ranks is told by the first, whose end ends the others before they speak."""
    waited: list[float] = []
    monkeypatch.setattr(leaving.first_has_failed, "wait", waited.append)
    for rank, message in (("0", "This disk is full."), ("3", "Rank 3: This disk is full.")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            cli.tell_once("This disk is full.")
        assert stop.value.code == message
    assert waited == [cli.TELL_SECONDS]
    assert cli.TELL_SECONDS < peers.GRACE_SECONDS - peers.NEWS_SECONDS  # before others give up


def test_mistake_that_the_first_process_tells_is_not_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(status: int) -> None:
        raise RuntimeError(f"left with {status}")

    monkeypatch.setattr(cli, "leave", leave)
    monkeypatch.setattr(leaving.first_has_failed, "wait", lambda seconds: True)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RuntimeError, match="left with 1"):
        cli.tell_once("This disk is full.")


HEADER = "# @package _global_\n"
# What an experiment's file holds, the line that is blamed, and what is said of it.
YAML_MISTAKES = {
    "bracket that is not closed": ("model:\n  net:\n    hidden: [1, 2\n", 4, "a [ is not closed"),
    "quotation mark that is not closed": ('name: "mine\n', 2, "a quotation mark"),
    "no colon": ("trainer:\n  max_epochs 3\n", 2, "no keys below trainer"),
    "no space after the colon": ("trainer:\n  max_epochs:3\n", 2, "a space after the colon"),
    "no colon in one of two lines": ("trainer:\n  max_epochs\n  max_steps: 3\n", 4, "none in"),
    "not indented": ("trainer:\nmax_epochs: 3\n", 2, "no keys below trainer"),
    "indented too far": ("trainer:\n  max_epochs: 3\n   max_steps: 3\n", 4, "indented deeper"),
    "indented too little": ("trainer:\n  max_epochs: 3\n max_steps: 3\n", 4, "otherwise than"),
    "tab": ("trainer:\n\tmax_epochs: 3\n", 3, "indent with spaces"),
    "key twice": ("seed: 3\nseed: 4\n", 3, "found duplicate key seed"),
    "misspelt group": ("trainr:\n  max_epochs: 3\n", 2, "Did you mean trainer?"),
    "key without its group": ("lr: 3\n", 2, "Did you mean model.optimizer.lr?"),
    "misspelt setting": ("checkpoint:\n  every_n_step: 3\n", 3, "checkpoint.every_n_steps?"),
}


# Whole files, and what is said of them.
DEFAULTS_MISTAKES = {
    "no package": ("defaults:\n  - override /data: synthetic\n", "# @package _global_"),
    "no override": (f"{HEADER}defaults:\n  - /model: mlp\n", "- override /model: <choice>"),
    "one without override": (
        f"{HEADER}defaults:\n  - override /data: synthetic\n  - model: mlp\n",
        "experiment/mine.yaml: write - override /model: mlp",
    ),
}


@pytest.mark.parametrize("name", DEFAULTS_MISTAKES)
def test_mistake_in_an_experiments_defaults_is_explained(name: str, experiment: Path) -> None:
    text, hint = DEFAULTS_MISTAKES[name]
    experiment.write_text(text)
    with pytest.raises(UserError) as said:
        compose_command("train", ["experiment=mine"], experiment.parents[1])
    assert hint in str(said.value)
    assert len(str(said.value).splitlines()) == 1


def test_no_rule_is_taken_for_a_misspelt_key() -> None:
    with pytest.raises(UserError, match="There is no key data") as said:
        compose_command("train", ["data=none", "+data.x=1", "data.num_workers=2"])
    assert "rules." not in str(said.value)


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[Path]:
    """The file of an experiment in a copy of conf/."""
    conf = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", conf)
    yield conf / "experiment" / "mine.yaml"
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("name", YAML_MISTAKES)
def test_mistake_in_a_yaml_file_is_told_with_its_line(
    name: str, experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, line, hint = YAML_MISTAKES[name]
    experiment.write_text(HEADER + text)
    arguments = ["train.py", "experiment=mine", f"output_dir={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stop:
        cli.main("train", experiment.parents[1])
    message = str(stop.value.code)
    assert message.startswith(f"{experiment}:{line}: ")
    assert hint in message
    assert len(message.splitlines()) <= 2
    assert not (tmp_path / "out").exists()


def test_key_that_another_value_is_filled_in_from_is_no_mistake(experiment: Path) -> None:
    experiment.write_text(f"{HEADER}width: 3\nmodel:\n  num_classes: ${{width}}\n")
    yaml_files.check_experiments("train", ["experiment=mine"], experiment.parents[1])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["model.net.hidden=[256,", "128]"], "'model.net.hidden=[256, 128]'"),
        (["model.net.hidden=[256,", "128]"], "model.net.hidden=[256,128],"),
        (["model.net.hidden=[256,128"], "a bracket is not closed"),
    ],
)
def test_list_that_the_shell_has_split_is_explained(
    words: list[str], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "model=mlp", *words])
    with pytest.raises(SystemExit, match=re.escape(hint)):
        cli.main("train", "conf")
