"""A mistake in YAML, a module or a data module gets its cause and a cure that can be typed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from harness import UserError
from harness.command.check import check
from harness.command.compose import compose_command
from harness.command.main import show
from harness.testing import command as typed
from tests.conftest import ROOT
from tests.faults.fork_server import command
from tests.refusals import refusal
from tests.training.test_owner_mistakes import OPTIMIZER, RIGHT, SAMPLE, STEP

H = "# @package _global_\n"
MINE = "experiment=mine"


class Row(NamedTuple):
    """A command with YAML files, a part of its answer, and what the answer says to type."""

    overrides: str
    says: str
    cure: str = ""  # overrides in place of the last one, as typed in a shell
    files: dict[str, str | bytes] = {}  # noqa: RUF012  # by their path below conf/


def mine(text: str | bytes) -> dict[str, str | bytes]:
    return {"experiment/mine.yaml": text}


NESTED = "[" * 200 + "]" * 200
NUMBER_KEYS = {"model/mine.yaml": "defaults: [mlp, _self_]\nnum_classes: 4\nweights: {0: 1.0}\n"}
ROWS = [
    Row("output_dir=~/runs", "", 'output_dir="$HOME/runs"'),
    Row("name=~x", "", "'name=\"~x\"'"),
    Row("tags=[a,b=c]", "", "'tags=[a,\"b=c\"]'"),
    Row("notes=it's \"good\" (or not)", "To set notes to this text, type: "),
    Row("notes=it's fine", "To set notes to this text, type: "),
    Row("model=mine model.weights.0=2", "are numbers", "model.weights={0:2}", NUMBER_KEYS),
    Row("callbacks=early_stopping callbacks.early_stopping.patence=3",
        "no key callbacks.early_stopping.patence. Did you mean callbacks.early_stopping.patience?"),
    Row("callbacks=early_stopping,ema", "several values", "callbacks=[early_stopping,ema]"),
    Row("model=mlp model.optimizer=sgd", "is a config group", "model/optimizer=sgd"),
    Row("model.optimizer._partial_=maybe", "_partial_=maybe must be true or false"),
    Row("model.net._target_=torch.nn.", "is not of the form <package>.<module>.<name>"),
    Row("model.net._target_=small.models:CNN", "is not of the form <package>.<module>.<name>"),
    Row("logger=[1]", "there is no conf/logger/1.yaml"),
    Row("callbacks=[ema,null]", "there is no conf/callbacks/null.yaml"),
    Row("notes=\"it", "close all brackets and quotes."),
    Row("checkpoint=", "is a group of keys. Set one of its keys: checkpoint.<key>=<value>."),
    Row("checkpoint=best.ckpt", "resume=<run> to resume a run, or init=<file>"),
    Row(f"notes={NESTED}", "or an override is nested too deeply"),
    Row("name=${hydra:job.name}", "Write ${run_dir} for the run's folder"),
    Row("+logger.x={a:1}", "logger.x has no _target_"),
    Row("+callbacks.x.monitor=y", "callbacks.x has no _target_"),
    Row("trainer.check_val_every_n_epoch=0", "must be a whole number, 1 or more"),
    Row("~trainer", "Leave out ~trainer"),
    Row("experiment=conf/experiment/mine.yaml", "Write mine,", MINE, mine(f"{H}seed: 3\n")),
    Row(MINE, "rename conf/experiment/mine.yml", "", {"experiment/mine.yml": H}),
    Row(MINE, "write: override /model: mlp", "", mine(f"{H}defaults:\n  - model: mlp\n")),
    Row(MINE, "write override /model: <choice>", "", mine(f"{H}defaults: [override model: mlp]\n")),
    Row(MINE, "The config has no model.", f"{MINE} model=cnn",
        mine(f"{H}defaults: [override /model:]\n")),
    Row(MINE, "write trainer: {max_epochs: <value>}", "", mine(f"{H}trainer.max_epochs: 3\n")),
    Row(MINE, "The first line of such a file", "", mine("# @package global\nseed: 3\n")),
    Row(MINE, "experiment/mine.yaml has no keys", "", mine("5\n")),
    Row(MINE, "a list in the place of keys", "", mine(f"{H}callbacks:\n  - _target_: a.B\n")),
    Row(MINE, "Write ${run_dir}", "", mine(f"{H}notes: ${{hydra:runtime.cwd}}\n")),
    Row(MINE, "mine.yaml: 'utf-8' codec", "", mine(f"{H}notes: caf\xe9\n".encode("latin-1"))),
    Row(MINE, "mine.yaml is not a config file: it begins with a byte", "",
        mine(b"\xef\xbb\xbf# @package _global_\n")),
    Row("seed=1", "rules.yaml is not valid YAML: 'utf-8'", "", {"rules.yaml": b"# caf\xe9\n"}),
    Row("model=mine", "model has no _target_", "", {"model/mine.yaml": "_Target_: small.Net\n"}),
    Row("model=mine", "not build model", "", {"model/mine.yaml": "_target_: a.B\n_partial_: true"}),
    Row("model=mine", "Write mlp, without", "", {"model/mine.yaml": "defaults: [model/mlp]\n"}),
    Row("trainer=mine", "no trainer.num_nodes", "",
        {"trainer/mine.yaml": "_target_: pytorch_lightning.Trainer\nmax_epochs: 3\n"}),
    # Keys, choices and lines of lightning-hydra-template.
    Row("hparams_search=x", "Use -m sweep=optuna, with"),
    Row("ckpt_path=a.ckpt", "Use resume=<run> to resume, init=<file>", "resume=auto"),
    Row("train=false", "use python evaluate.py checkpoint=<run>"),
    Row("paths.data_dir=x", "no key paths. Leave it out."),
    Row("extras=default", "Leave it out."),
    Row("hydra=default", "There is no group hydra. Leave it out."),
    Row("optimized_metric=val/mae", "Use objective=<metric>.", "objective=val/mae"),
    Row("task_name=x", "Use name=<name>.", "name=x"),
    Row("trainer=gpu", "Use strategy=gpu.", "strategy=cpu"),
    Row("trainer=ddp", "Use strategy=ddp trainer.devices=<number>.", "strategy=ddp"),
    Row("trainer=cpu.yaml", "Use strategy=cpu.", "strategy=cpu"),
    Row("logger=tensorboard", "Leave it out"),
    Row("logger.aim.experiment=x", "Leave it out, or use logger=wandb", "logger=wandb"),
    Row("callbacks=default.yaml", "there is no conf/callbacks/default.yaml. Leave it out",
        "callbacks=early_stopping"),
    Row("callbacks.model_checkpoint.monitor=val/acc", "Use objective=<metric> and mode=<mode>",
        "objective=val/acc"),
    Row(MINE, "mine.yaml:2: nothing reads optimized_metric. Use objective=<metric>.",
        f"{MINE} ~optimized_metric", mine(f"{H}optimized_metric: val/mae\n")),
    Row(MINE, "There is no group paths. Leave it out.", "",
        mine(f"{H}defaults: [override /paths: default]\n")),
    Row(MINE, "Remove logger.tensorboard.name.", f"{MINE} logger.tensorboard.name=''",
        mine(f"{H}logger:\n  tensorboard:\n    name: stars\n")),
    Row("data=mnist.yaml", "there is no conf/data/mnist.yaml."),
    # A key at the top level is read only if conf/train.yaml has it.
    Row("foo=3", "Write a key of your own into conf/train.yaml."),
    Row("trainer.min_epochs=3", "To add it, write +trainer.min_epochs=3.", "+trainer.min_epochs=3"),
    Row("checkpoint.every=3", "Did you mean checkpoint.every_"),
    Row("callbacks.x=3", "There is no key callbacks.x."),
    Row("model=mlp", "The config has no output_dir, seed", "",
        {"train.yaml": "defaults: [{data: synthetic}, {model: mlp}, {trainer: default}]\n"}),
]  # fmt: skip


def answer(overrides: list[str]) -> str:
    try:
        check(compose_command("train", overrides))
    except UserError as error:
        return str(error)
    return ""


def from_shell(text: str) -> list[str]:
    """The arguments that a shell makes of a text."""
    return subprocess.check_output(["bash", "-c", f"printf '%s\\n' {text}"], text=True).splitlines()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.overrides[:40])
def test_mistake_in_yaml_or_command_is_answered(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    for name, text in row.files.items():
        path = tmp_path / "conf" / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    first, *rest = row.overrides.split(" ", 1)
    overrides = [first, *rest] if rest and "=" in rest[0] else [row.overrides]
    said = answer(overrides)
    assert row.says in said
    assert 0 < len(said.splitlines()) <= 2
    cure = row.cure
    if " type: " in said:  # what it says to type is what a shell and Hydra read
        cure = said.partition(" type: ")[2]
        assert row.cure in ("", cure)
    if cure:
        assert answer([*overrides[:-1], *from_shell(cure)]) == ""


def test_key_of_the_users_own_train_yaml_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the answer to a key at the top level says; nothing would read +width=3."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    assert "nothing reads width" in answer(["+width=3"])
    for key in ("width", "paths", "train"):  # keys of another template as well
        with (tmp_path / "conf" / "train.yaml").open("a") as file:
            file.write(f"{key}: 1\n")
        assert answer([f"{key}=3"]) == ""


def test_flag_is_answered_with_a_key_of_the_typed_choices() -> None:
    for overrides, num in ((["callbacks=ema"], 1), ([], 0)):
        with pytest.raises(UserError) as error:
            show("train", ROOT / "conf", [*overrides, "--decay", "0.9"])
        assert str(error.value).count("Did you mean callbacks.ema.decay=<value>?") == num


def test_quoted_text_is_what_was_meant(tmp_path: Path) -> None:
    for value in ('it\'s "good" (or not)', "it's fine", "a(b)", "~x", '"', "a=b"):
        said = refusal(f"notes={value}")
        (typed,) = from_shell(said.partition(" type: ")[2])
        assert compose_command("train", [typed], ROOT / "conf").cfg.notes == value
    said = refusal("tags=[a,b=c, d(e)]")
    (typed,) = from_shell(said.partition(" type: ")[2])
    assert compose_command("train", [typed], ROOT / "conf").cfg.tags == ["a", "b=c", "d(e)"]


PLAIN_DATA = RIGHT.replace(
    RIGHT[RIGHT.index("class Data(") : RIGHT.index("class Net(")],
    """from torch.utils.data import DataLoader

class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()

    def train_dataloader(self):
        return DataLoader(Numbers("train"), batch_size=8)


""",
)
TESTS = """
    def test_step(self, batch, batch_idx):
        self.log("test/loss", self(batch[0]).mean())
"""
SAMPLE_LINES = "    def __getitem__(self, index):\n" + SAMPLE
SCHEDULE = """        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=TOTAL)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
"""
LOADER = "    def train_dataloader(self):\n        return DataLoader("
ATTRIBUTE = "        self.train_dataloader = DataLoader(list([0]"
# Mistakes in a module or a data module: the text, a part of it, its replacement, and the answer.
CODE = [
    (RIGHT, STEP, "        h = self(x).exp()\n        h += 1\n        loss = h.mean()\n",
     "Set +trainer.detect_anomaly=true to see its line."),
    (RIGHT, STEP, f"{STEP}        loss = self.old = loss + getattr(self, 'old', 0)\n",
     "kept from an earlier step needs detach()"),
    (RIGHT, OPTIMIZER, SCHEDULE.replace("TOTAL", "2"),
     "total_steps=self.trainer.estimated_stepping_batches"),
    (RIGHT, SAMPLE, "        pass\n", "__getitem__ must return numbers, or tensors"),
    (RIGHT, SAMPLE_LINES, "", "should implement __getitem__"),
    (RIGHT, "return 24\n", "return 24 / 1\n", "with a __len__ that is a whole number"),
    (RIGHT, "        super().__init__(batch_size=8, **settings)\n", "        self.size = 8\n",
     "data: Data.__init__ must call super().__init__() first."),
    (PLAIN_DATA, "        super().__init__()\n\n    def", "        self.x = 1\n\n    def",
     "data: Data.__init__ must call super().__init__() first."),
    (PLAIN_DATA, f'\n{LOADER}Numbers("train"', ATTRIBUTE,
     "Write: def train_dataloader(self): return DataLoader(...)"),
]  # fmt: skip


def run(
    folder: Path, text: str, *overrides: str, **conf: str
) -> "subprocess.CompletedProcess[str]":
    """Run a text's ``Model`` and ``Data``, which belong to the package ``mine``."""
    shutil.copytree(ROOT / "conf", folder / "conf", dirs_exist_ok=True)
    (folder / "mine.py").write_text(text)
    for group in ("model", "data"):
        target = conf.get(group, f"_target_: mine.{group.title()}\n")
        (folder / "conf" / group / "mine.yaml").write_text(target)
    words = ["model=mine", "data=mine", "trainer.max_epochs=1", "watch=none", "logger=none"]
    words += ["strategy=cpu", "trainer.enable_progress_bar=false", *overrides]
    environment = {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"}
    return command("train.py", *words, environment=environment)


@pytest.mark.parametrize(("text", "old", "new", "says"), CODE, ids=lambda text: text[-30:].strip())
def test_mistake_in_code_is_answered(
    text: str, old: str, new: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch or Lightning raises outside the user's file."""
    monkeypatch.chdir(tmp_path)
    assert text.count(old) == 1
    result = run(tmp_path, text.replace(old, new))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert says in result.stderr
    assert len(result.stderr.splitlines()) <= 3


def test_what_the_answers_say_to_type_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = CODE[0][1:3]
    result = run(tmp_path, RIGHT.replace(old, new), "+trainer.detect_anomaly=true")
    assert "in training_step\n    h = self(x).exp()" in result.stderr
    total = "self.trainer.estimated_stepping_batches"
    assert run(tmp_path, RIGHT.replace(OPTIMIZER, SCHEDULE.replace("TOTAL", total))).returncode == 0
    # A stream without a length, with a schedule.
    stream = PLAIN_DATA.replace(
        "(Dataset):",
        "(torch.utils.data.IterableDataset):\n    def __iter__(self):\n"
        "        return (self[i] for i in range(24))\n\n",
    ).replace("    def __len__(self):\n        return 24\n", "")
    model = "defaults: [mlp, _self_]\nnet: {in_features: 6}\nnum_classes: 4\n"
    result = run(tmp_path, stream, model=model)
    assert "but Lightning estimates -1 steps.\nSet trainer.max_steps=<n>, or use" in result.stderr
    assert run(tmp_path, stream, "trainer.max_steps=2", model=model).returncode == 0
    assert run(tmp_path, stream, "model/scheduler=constant", model=model).returncode == 0


def test_debug_settings_fit_a_data_module_of_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, PLAIN_DATA, "debug=overfit", "trainer.max_epochs=1").returncode == 0


def test_file_at_resume_is_answered_by_init_which_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a checkpoint of Lightning's of another program."""
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, RIGHT).returncode == 0
    path = next(tmp_path.glob("outputs/*/*/checkpoints/step_*.ckpt"))
    shutil.copy(path, tmp_path / "old.ckpt")
    said = run(tmp_path, RIGHT, "resume=old.ckpt").stderr
    assert "Use init=old.ckpt to start" in said
    assert run(tmp_path, RIGHT, "init=old.ckpt").returncode == 0
    run_dir = path.parent.parent.relative_to(tmp_path)
    said = run(tmp_path, RIGHT, f"resume={run_dir}", "seed=3").stderr
    assert f"type init={run_dir} in place of resume" in said
    assert run(tmp_path, RIGHT, f"init={run_dir}", "seed=3").returncode == 0


def test_file_at_checkpoint_is_answered_by_init_whose_run_can_be_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a checkpoint of Lightning's of another program, whose folder has no config."""
    monkeypatch.chdir(tmp_path)
    text = RIGHT + TESTS
    tested = run(tmp_path, text, "output_dir=first", "watch=default")
    assert tested.returncode == 0
    best = next(tmp_path.glob("first/*/*/checkpoints/best.ckpt"))
    shutil.copy(best, tmp_path / "old.ckpt")
    said = command("evaluate.py", "checkpoint=old.ckpt").stderr
    words = said.splitlines()[-1].split()
    assert words[:2] == ["python", "train.py"]
    assert words[-2:] == ["init=old.ckpt", "trainer.max_epochs=0"]
    again = run(
        tmp_path, text, "output_dir=second", "watch=default", "+trainer.min_epochs=3", *words[-2:]
    )
    assert again.returncode == 0
    assert "WARNING" not in again.stderr
    (first,), (second,) = (tmp_path.glob(f"{name}/*/*") for name in ("first", "second"))
    results = [json.loads((folder / "results.json").read_text()) for folder in (first, second)]
    assert results[0]["test/loss"] == results[1]["test/loss"]
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    assert command("evaluate.py", f"checkpoint={second}", environment=environment).returncode == 0


def test_ctrl_c_while_a_command_imports_ends_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "omegaconf.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    result = typed("train.py", "--help", environment={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 130
    assert result.stderr == "Interrupted before the run started.\n"


def test_reader_of_new_may_end_before_its_files_are_written(tmp_path: Path) -> None:
    (tmp_path / "src" / "p").mkdir(parents=True)
    (tmp_path / "src" / "p" / "__init__.py").touch()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").touch()
    program = f"{sys.executable} -m harness.new model mine | true"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0
    assert result.stderr == ""
    assert (tmp_path / "src" / "p" / "models" / "mine.py").exists()
