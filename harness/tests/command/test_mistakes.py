"""A mistake in a command gets one to three lines that say what to type, and leaves nothing."""

import shutil
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
from omegaconf import OmegaConf

from harness import UserError, train
from harness.command.check import check
from harness.command.compose import compose, compose_command
from harness.testing import command as typed
from tests.conftest import ROOT
from tests.faults.fork_server import command
from tests.refusals import refusal
from tests.strategy_runs import write_conf

MISTAKES = {
    "trainer.devcies=2": "Did you mean trainer.devices?",
    "lr=0.1": "Did you mean model.optimizer.lr?",
    "+learning_rate=0.1": "nothing reads learning_rate. Did you mean model.optimizer.lr?",
    "+split=val": "+split=val: nothing reads split.",
    "+checkpoint.every_n_step=3": "Did you mean checkpoint.every_n_steps?",
    "model.optimizer.learning_rate=0.1": "Did you mean model.optimizer.lr?",
    "seed=${oc.env:HOME}": "write ${oc.decode:${oc.env:NAME}}",
    "stratgy=ddp": "Did you mean strategy=ddp?",
    "modle=mlp": "Did you mean model=mlp?",
    "experiment synthetic": "write experiment=synthetic",
    "model=cnnn": "Did you mean model=cnn?",
    "experiment=syntetic": "Did you mean experiment=synthetic?",
    "data=": "Choices: none, synthetic",
    "+strategy=ddp": "Multiple values for strategy",
    "strategy": "not of the form key=value",
    "name=cnn(2)": "'name=\"cnn(2)\"'",
    "run_dir=here": "use output_dir=",
    "callbacks.ema.decay=0.9": "no key callbacks.ema without callbacks=ema. Add this override.",
    "data.batch_size=many": "must be a whole number, 1 or more",
    "seed=99999999999": "a whole number, 0 to 4294967295",
    "data.pin_memory=maybe": "true, false or auto",
    "trainer.devices=0": "a whole number, 1 or more, a list",
    "trainer.devices=-1": "trainer.devices=<number of processes>",
    "strategy=cpu trainer.devices=[0,1]": "trainer.devices=<number of processes>",
    "trainer.accelerator=tpu": "cpu, gpu, cuda or mps",
    "~strategy": "Leave out ~strategy",
    "model.net._target_=MLP": "model.net._target_=MLP needs its package",
    "strategy=null": "there is no conf/strategy/null.yaml",
    "name=../x": "without '..'",
    "strategy=ddp trainer.num_nodes=2": "or torchrun or srun",
    "strategy=ddp trainer.devices=2 data.batch_size=1": "Use data.batch_size=2 or more",
    "trainer.val_check_interval=00:10:00": "a number, 0.0 to 1.0 or null",
    "test=perhaps": "must be true or false",
    "trainer.deterministic=no": "write true or false",
    "seed=${nope}": "Add that key to your conf/train.yaml, or write a value",
    "checkpoint.num_kept=1": "must be a whole number, 2 or more",
    "strategy=gpu": "strategy=cpu",
    "callbacks=[early_stoping]": "Did you mean callbacks=early_stopping?",
    "callbacks=early_stopping,ema": "type callbacks=[early_stopping,ema]",
    "scheduler=cosine": "Did you mean model/scheduler=cosine?",
    "tags=lr": "must be a list, such as",
    "gpus=emptiest": "eave out gpus=emptiest",
    "gpus=emptiest trainer.devices=[0,1]": "Use trainer.devices=<number>",
    "gpus.min_free_gib=20": "needs gpus=emptiest",
    "sweep=optuna": "python train.py -m sweep=optuna",
    "objective=val/quality": "add mode",
    "gpus=2": "strategy=ddp trainer.devices=<number of GPUs>",
    "+trainer.gpus=2": "strategy=ddp trainer.devices=<number of GPUs>",
    "distributed_backend=ddp": "Use strategy=",
    "accelerator=ddp": "Use strategy=cpu or strategy=gpu",
    "strategy=ddp_cpu": "Use strategy=ddp trainer.accelerator=cpu",
    "trainer.accelerator=ddp": "cpu, gpu, cuda or mps",
    # What Hydra would do itself.
    "hydra/launcher=slurm": "python train.py -m <overrides> for sweeps",
    "hydra.sweep.dir=x": "Use output_dir= and name=",
    "--epochs 3": "Did you mean trainer.max_epochs=<value>?",
    "--resolve": "--cfg job",
    "--cfg job --resolve seed=${nope}": "nope",
    "output_dir=train.py": "output_dir=<folder>",
    "-m seed=1,2 output_dir=train.py": "output_dir=<folder>",
}

# These are found once the framework is there to ask.
LATE_MISTAKES = {
    "model=cnn model.net._target_=small.models.CNNN": "Did you mean small.models.CNN?",
    "+data.batchsize=3": "has no argument batchsize. Did you mean batch_size?",
    "model.optimizer.lr=-1": "Invalid learning rate",
    "model.optimizer.lr=fast": "lr=fast",
    "model.label_smoothing=abc": "model.label_smoothing=abc is text, but",
    "+model.learning_rate=0.1": "has no argument learning_rate.",
    "model._target_=pytorch_lightning.demos.boring_classes.BoringModel": "override /model: null",
}


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_mistake_is_explained(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth of them, or all."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for overrides, hint in [*MISTAKES.items()][::step]:
        said = refusal(f"output_dir={tmp_path / 'out'}", *overrides.split())
        assert hint in said, overrides
        assert len(said.splitlines()) <= 2, said
        assert not (tmp_path / "out").exists(), overrides


def test_every_range_takes_a_number_inside_it_and_refuses_one_outside() -> None:
    for word in ("trainer.val_check_interval=0.25", "trainer.val_check_interval=7", "seed=0"):
        check(compose_command("train", [word]))
    for word in ("trainer.val_check_interval=-0.5", "trainer.val_check_interval=1.5", "seed=-1"):
        with pytest.raises(UserError, match=r"a (whole )?number"):
            check(compose_command("train", [word]))


def test_mistake_that_needs_the_framework_is_explained(tmp_path: Path) -> None:
    for overrides, hint in LATE_MISTAKES.items():
        with pytest.raises(UserError) as refused:
            train(f"output_dir={tmp_path}", *overrides.split())
        assert hint in str(refused.value)
        assert len(str(refused.value).splitlines()) <= 2
        assert list(tmp_path.iterdir()) == []


def test_evaluation_refuses_what_is_no_checkpoint_and_what_is_of_the_run(
    finished_run: Path, tmp_path: Path
) -> None:
    evaluated = [*finished_run.glob("evaluate/*")]  # by other tests of the same run
    checkpoint = finished_run / "checkpoints" / "best.ckpt"
    (tmp_path / "best.ckpt").touch()
    for overrides, hint in (
        ((), "Add checkpoint="),
        (("checkpoint=nope.ckpt",), "Use checkpoint=<run>, a run's folder"),
        ((f"checkpoint={tmp_path}",), "is not a file. Use checkpoint=<run>"),
        (
            (f"checkpoint={tmp_path / 'best.ckpt'}",),
            "Keep it in the checkpoints/ folder of its run",
        ),
        ((f"checkpoint={checkpoint}", "experiment=cnn"), "config of the checkpoint's run. Leave"),
        ((f"checkpoint={checkpoint}", "+split=val"), "nothing reads split"),
    ):
        for task in ("evaluate", "predict"):
            assert hint in refusal(*overrides, task=task)
    overrides = (f"checkpoint={checkpoint}", f"output={tmp_path / 'table.csv'}")
    (tmp_path / "table.csv").write_text("mine")
    assert "table.csv already exists. Use another name" in refusal(*overrides, task="predict")
    assert [*finished_run.glob("evaluate/*")] == evaluated
    result = command("evaluate.py", overrides[0], "model.net.hidden=[8]")
    assert result.returncode == 1
    assert "does not fit the model" in result.stderr
    assert "Traceback" not in result.stderr


def test_processes_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """In a sweep each would name its own folder, and wait for the others for ever."""
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    by_hand = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    of_sweep = "out trainer.num_nodes, torchrun and srun"
    for environment, overrides, hint in (
        (torchrun, "", "torchrun has started 2 processes, but these settings need 1"),
        (torchrun, "-m seed=1,2", of_sweep),
        (by_hand, "-m seed=1,2 strategy=ddp trainer.num_nodes=2", of_sweep),
    ):
        typed_words = (f"output_dir={tmp_path}", *overrides.split())
        assert hint in command("train.py", *typed_words, environment=environment).stderr
    assert not list(tmp_path.iterdir())


def test_answers_do_not_import_torch(tmp_path: Path) -> None:
    """``--help``, ``--cfg job`` and mistakes answer at once."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    blocked = {"PYTHONPATH": str(tmp_path)}
    helped = typed("train.py", "--help", environment=blocked)
    groups = [line.split() for line in helped.stdout.splitlines()[1:-1]]
    assert [group[0] for group in groups[:3]] == ["experiment", "model", "data"]
    assert groups[2][1:] == ["none,", "synthetic"]  # files that begin with _ are parts of others
    shown = typed("train.py", "seed=3", "--cfg", "job", "--resolve", environment=blocked)
    assert OmegaConf.create(shown.stdout) == compose("train", ["seed=3"])
    assert "Did you mean" in typed("train.py", "trainer.devcies=2", environment=blocked).stderr
    # The block works: a run does import torch.
    assert "torch was imported" in typed("train.py", environment=blocked).stderr


HEADER = "# @package _global_\n"
# The text of an experiment's file, the number of its wrong line, and the message.
YAML_MISTAKES = [
    ("trainer:\n  max_epochs:3\n", 2, "a space after its colon"),
    ("trainer:\nmax_epochs: 3\n", 2, "indented"),
    ("lr: 3\n", 2, "Did you mean model.optimizer.lr?"),
    ("hydra:\n  run:\n    dir: x\n", 2, "has no effect"),
    ("defaults:\n  - override /hydra/launcher: basic\n", 3, "has no effect"),
    ("checkpoint:\n  every_n_step: 3\n", 3, "checkpoint.every_n_steps?"),
    ("objective: val/quality\n", 2, "add mode=min if"),
]
# Whole files, and messages by us, Hydra or PyYAML, which name file and line.
FILES = {
    "name: x\n": "# @package _global_",
    "defaults:\n  - override /data: synthetic\n": "# @package _global_",
    f"{HEADER}defaults:\n  - mine\n": "include that file itself",
    f"{HEADER}defaults:\n  - /model: mlp\n": "Multiple values for model",
    f"{HEADER}seed: 3\nseed: 4\n": 'duplicate key seed in "{file}", line 3',
    f"{HEADER}model:\n  net:\n    hidden: [1, 2\n": '"{file}", line 4',
    f'{HEADER}name: "mine\n': 'quoted scalar in "{file}", line 2',
    f"{HEADER}trainer:\n\tmax_epochs: 3\n": 'any token in "{file}", line 3',
}


def test_mistake_in_a_yaml_file_is_told_with_its_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    experiment = tmp_path / "conf" / "experiment" / "mine.yaml"
    overrides = ("experiment=mine", f"output_dir={tmp_path / 'out'}")
    for text, line, hint in YAML_MISTAKES:
        experiment.write_text(HEADER + text)
        said = refusal(*overrides, conf=tmp_path / "conf")
        assert said.startswith(f"{experiment}:{line}: "), text
        assert hint in said, text
        assert len(said.splitlines()) <= 2
    for text, hint in FILES.items():
        experiment.write_text(text)
        said = refusal(*overrides, conf=tmp_path / "conf")
        assert hint.format(file=experiment) in said, text
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    experiment.unlink()
    theirs = tmp_path / "theirs"
    text = "hydra: {callbacks: {a: {_target_: harness.monitoring.a.A}}}\n"
    said = refusal(*write_conf(theirs, logger=text))
    assert said.startswith(f"{theirs / 'conf' / 'logger' / 'mine.yaml'}:1: hydra: ")
    # A key that another value is filled in from is no mistake.
    experiment.write_text(f"{HEADER}width: 3\nmodel:\n  num_classes: ${{width}}\n")
    check(compose_command("train", overrides, tmp_path / "conf"))


def test_a_trainer_file_that_a_strategy_replaces_is_refused(tmp_path: Path) -> None:
    """Such as ``ddp_sim`` of lightning-hydra-template, which would train on one device."""
    conf = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", conf)
    text = "defaults: [default]\nstrategy: ddp\naccelerator: cpu\ndevices: 2\n"
    (conf / "trainer" / "ddp_sim.yaml").write_text(text)
    said = refusal("trainer=ddp_sim", conf=conf)
    assert (
        "trainer/ddp_sim.yaml sets strategy: ddp, but strategy=auto replaces this value by auto"
        in said
    )
    assert "strategy=ddp trainer.devices=2" in said
    (conf / "trainer" / "mine.yaml").write_text("defaults: [ddp_sim]\nmax_epochs: 3\n")
    assert "trainer/ddp_sim.yaml sets strategy" in refusal("trainer=mine", conf=conf)
    (conf / "trainer" / "mine.yaml").write_text("defaults: [default]\ndevices: 1\n")
    assert compose("train", ["trainer=mine"], conf).trainer.devices == 1  # as the strategy says


def test_a_value_that_no_config_holds_is_named(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", conf)
    path = conf / "experiment" / "mine.yaml"
    path.write_text("# @package _global_\ntags: !!set {a}\n")
    said = refusal("experiment=mine", conf=conf)
    assert said == "tags: Value 'set' is not a supported primitive type"


@pytest.mark.parametrize(
    ("overrides", "cure"),
    [
        (("strategy=ddp", "trainer.devices=640", "data.batch_size=640"), "trainer.devices="),
        (("data.num_workers=10000",), "data.num_workers=auto"),
    ],
)
def test_far_more_processes_than_cores_are_refused(overrides: tuple[str, ...], cure: str) -> None:
    said = refusal(*overrides, "trainer.accelerator=cpu")
    assert "cores" in said
    assert f"Use {cure}" in said


class Leaves(pl.Callback):
    """Ends the process as a user's step may."""

    def on_train_batch_end(self, *_: object) -> None:
        """Leave with status 0."""
        sys.exit()


def test_a_step_that_leaves_ends_with_a_failure(tmp_path: Path) -> None:
    mine = f"+callbacks.leaves._target_={__name__}.Leaves"
    result = command("train.py", "data=synthetic", "model=mlp", mine, f"output_dir={tmp_path}")
    assert result.returncode == 1
    assert "sys.exit() ended the run before the run was complete" in result.stderr
    assert "test_mistakes.py:" in result.stderr
