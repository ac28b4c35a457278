"""A stranger's run or YAML file may not turn on everything: see docs/strangers_files.md."""

import json
import logging
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint

from harness import compare as runs
from harness import provenance
from harness import reproduce as reproducing
from harness.checkpoints import lookup
from harness.checkpoints.tracked_attributes import set_value
from harness.command import run_folder
from harness.command.compose import compose
from harness.errors import UserError
from harness.files import write_yaml
from harness.runs import reading
from harness.training import log_file, summary
from tests.command.test_resume_command import contents
from tests.conftest import ROOT
from tests.faults.fork_server import command
from tests.refusals import refusal

TRUSTED = "checkpoint.trusted is true in "


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """The project's config files, to which a test adds a stranger's."""
    return Path(shutil.copytree(ROOT / "conf", tmp_path / "conf"))


@pytest.fixture
def stranger(finished_run: Path, tmp_path: Path) -> Path:
    """A run folder that a test makes hostile."""
    return Path(shutil.copytree(finished_run, tmp_path / "stranger", symlinks=True))


def frozen(path: Path, *changes: tuple[str, str]) -> None:
    """Change a file of a run, and its checksum with it, as a stranger does."""
    text = path.read_text().partition("\n")[2]
    for old, new in changes:
        assert old in text, (old, text)
        text = text.replace(old, new)
    write_yaml(path, text)


def test_a_strangers_run_does_not_grant_trust_to_its_own_checkpoints(stranger: Path) -> None:
    frozen(stranger / "config.yaml", ("trusted: false", "trusted: true"))
    before = contents(stranger)
    longer = "trainer.max_epochs=3"
    said = refusal(f"resume={stranger}", longer)
    assert said.startswith(f"{TRUSTED}the config of {stranger}")
    assert "type checkpoint.trusted=true\nin this command" in said
    # Nor do the overrides that the folder records as its command.
    frozen(stranger / "overrides.yaml", ("- model=mlp", "- model=mlp\n- checkpoint.trusted=true"))
    assert refusal(f"resume={stranger}", longer).startswith(TRUSTED)
    frozen(stranger / "config.yaml", ("trusted: true", "trusted: false"))
    assert compose("train", [f"resume={stranger}"]).checkpoint.trusted is False
    assert {**contents(stranger), **before}.keys() == before.keys()


@pytest.mark.parametrize(
    "text",
    [
        "checkpoint: {trusted: true}",
        "checkpoint: {trusted: true}\n'hydra': {overrides: {task: [checkpoint.trusted=true]}}",
    ],
)
def test_an_experiment_grants_no_trust(conf: Path, stranger: Path, text: str) -> None:
    path = conf / "experiment" / "theirs.yaml"
    path.write_text(f"# @package _global_\nresume: {stranger}\n{text}\n")
    said = refusal("experiment=theirs", conf=conf)
    assert said.startswith(TRUSTED)


def test_the_user_grants_trust_by_a_typed_override_or_by_the_rules(conf: Path) -> None:
    path = conf / "experiment" / "theirs.yaml"
    path.write_text("# @package _global_\ncheckpoint: {trusted: true}\n")
    words = ["experiment=theirs", "checkpoint.trusted=true"]
    assert compose("train", words, conf).checkpoint.trusted
    with (conf / "rules.yaml").open("a") as file:
        file.write("trusted: [checkpoint.trusted]\n")
    assert compose("train", words[:1], conf).checkpoint.trusted


@pytest.mark.parametrize("name", [".lock", "checkpoints", "tensorboard", "tensorboard/more"])
def test_a_link_out_of_a_run_folder_is_refused_before_anything_is_written(
    stranger: Path, tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "events.out.tfevents.1").write_text("mine")
    (victim / "step_1.ckpt").write_text("mine")
    link = stranger / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(victim / "step_1.ckpt" if name == ".lock" else victim)
    before = contents(tmp_path)
    said = refusal(f"resume={stranger}", "trainer.max_epochs=3")
    assert f"{name} is a link to a place outside of its run's folder" in said
    for task in ("evaluate", "predict"):
        path = stranger / "checkpoints" / "best.ckpt"
        if path.exists():
            assert "is a link to a place outside of" in refusal(f"checkpoint={path}", task=task)
    assert contents(tmp_path) == before


def test_a_pipe_in_a_run_folder_is_refused_and_nothing_waits_for_it(stranger: Path) -> None:
    os.mkfifo(stranger / "tensorboard" / "events.out.tfevents.2")
    assert "or is not a regular file" in refusal(f"resume={stranger}", "trainer.max_epochs=3")
    for name in ("config.yaml", "overrides.yaml", "results.json", "record.json", "metrics.csv"):
        (stranger / name).unlink()
        os.mkfifo(stranger / name)
    assert reading.read(stranger)["status"] == "damaged"
    assert run_folder.runs_in(stranger.parent) == [stranger]


def test_a_checkpoint_names_no_file_that_is_deleted(stranger: Path, tmp_path: Path) -> None:
    """For ModelCheckpoint, and for a user's subclass by its changed attributes."""
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    last = stranger / "checkpoints" / "last.ckpt"
    found = torch.load(last, weights_only=True)
    (state,) = (s for key, s in found["callbacks"].items() if "ModelCheckpoint" in key)
    folder = state["dirpath"]
    path = f"{folder}/X/../../../victim.txt"
    worst = {path: torch.tensor(-1.0)}
    state |= {"best_k_models": worst, "kth_best_model_path": path, "kth_value": worst[path]}
    state |= {"best_model_path": path, "last_model_path": path}
    torch.save(found, last)  # through the link
    result = command("train.py", f"resume={stranger}", "trainer.max_epochs=3")
    assert result.returncode == 0, result.stderr
    assert "forgets its earlier files" in result.stderr
    assert victim.read_text() == "mine"


class Mine(ModelCheckpoint):
    """A subclass, whose attributes checkpoints keep."""


def test_a_checkpoint_sets_no_attribute_that_no_run_of_ours_keeps() -> None:
    mine, module = Mine(), LightningModule()
    for name in ("best_k_models", "_monitor", "on_train_end", "__class__"):
        with pytest.raises(KeyError, match="no attribute of callback Mine"):
            set_value(module, {"callback Mine": mine}, ("callback Mine", name), {})
    set_value(module, {"callback Mine": mine}, ("callback Mine", "seen"), 3)
    assert mine.seen == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "--output=victim"},
        {"commit": "HEAD"},
        {"started_in": "/a/../b", "repository": "/a"},
        {"started_in": "/stranger", "repository": "/a"},
        {"diff": "../../theirs.diff"},
        {"diff": "--directory=/"},
        {"num_threads": "1\0"},
    ],
)
def test_a_record_hands_git_no_options_and_leads_to_no_other_code(
    stranger: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    (start,) = provenance.read(stranger)["starts"]
    start |= {"diff": None}
    start.pop("no_diff", None)
    called: list[Any] = []
    monkeypatch.setattr(reproducing, "git", lambda *words, **_: called.append(words))
    provenance.note(stranger, starts=[start | changes])
    with pytest.raises(UserError, match=r"its record\.json was changed by hand"):
        reproducing.reproduce(stranger, None)
    assert called == []


LEVELS = [f"n{i}: ${{n{i + 1}}}${{n{i + 1}}}" for i in range(30)]
NINE = "".join(f"  - &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 6))
BOMBS = {
    "aliases": f"notes: &a0 [{','.join('x' * 9)}]\ntags:\n{NINE}",
    "an alias in itself": "tags: &a [*a]",
    "merged aliases": "a: &a {" + ",".join(f"k{i}: 0" for i in range(99)) + "}\n"
    "tags: [" + ",".join(["{<<: *a}"] * 99) + "]",
    "interpolations": "\n".join(["notes: ${n0}", *LEVELS, "n30: x"]),
    "a chain": "\n".join(["notes: ${n0}", *(f"n{i}: ${{n{i + 1}}}" for i in range(99)), "n99: x"]),
    "deep": "tags: " + "[" * 200 + "]" * 200,
    "deep blocks": "tags:\n  " + "- " * 200 + "x",
    "values": f"tags: [{'a,' * 5001}]",
    "bytes": f"notes: {'x' * 2**18}",
    "a number": f"notes: {'59:' * 5000}59",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_yaml_file_stands_for_no_more_than_settings_do(conf: Path, bomb: str) -> None:
    (conf / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{BOMBS[bomb]}\n")
    said = refusal("experiment=theirs", conf=conf)
    assert "is not a config file" in said or "interpolations" in said


@pytest.mark.parametrize("bomb", [name for name in BOMBS if name not in ("values", "a chain")])
def test_a_bomb_in_a_run_is_damage_and_does_not_stop_the_list(
    stranger: Path, bomb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (stranger / "config.yaml").read_text().partition("\n")[2]
    write_yaml(stranger / "config.yaml", f"{text}\nmine:\n  {BOMBS[bomb]}\n".replace("\n", "\n  "))
    with pytest.raises(UserError, match="is not the config of a run"):
        run_folder.load_config(stranger)


def test_a_frozen_config_names_no_variable_of_the_environment(stranger: Path) -> None:
    frozen(stranger / "config.yaml", ("notes: null", "notes: ${oc.env:HOME}"))
    with pytest.raises(UserError, match=r"\$\{oc\.env:HOME\} is not replaced"):
        run_folder.load_config(stranger)
    best = stranger / "checkpoints" / "best.ckpt"
    assert "is not replaced by a value" in refusal(f"checkpoint={best}", task="evaluate")


MANY = ",".join(f"m{i}" for i in range(500_000))
FILES = {
    "results.json": ["[" * 100_000, '{"a":' * 200 + "1" + "}" * 200, "[" + "{}," * 500_000 + "{}]"],
    "record.json": [
        "[]",
        '{"starts": [{"packages": {"torch": 1}}]}',
        '{"starts": [1]}',
        "[" * 100_000,
        '{"a": ' + "[" * 200 + "]" * 200 + "}",
    ],
    "metrics.csv": [f"step,{MANY}\n1,2\n" * 20, '"\n",' + MANY, "step\n" + "\n" * 2**23],
    "config.yaml": ["[]", "model: &a {b: *a}", "model: {" + "a: 1," * 6000 + "}"],
}


@pytest.mark.parametrize(("name", "number"), [(n, i) for n in FILES for i in range(len(FILES[n]))])
def test_a_file_beyond_the_limits_makes_a_run_damaged(
    stranger: Path, name: str, number: int
) -> None:
    if name == "metrics.csv":
        provenance.note(stranger, best=None)
    (stranger / name).write_text(FILES[name][number])
    run = reading.read(stranger)
    assert (run["status"], run["reason"]) == ("damaged", f"{name} cannot be read")
    reading.as_frame([run])


def test_numbers_that_no_column_holds_are_listed(stranger: Path) -> None:
    (stranger / "results.json").write_text('{"a": 1%s, "b": NaN, "c": -1%s}' % (("0" * 400,) * 2))
    frozen(stranger / "config.yaml", ("notes: null", f"mine: 1{'0' * 350}"))
    frame = reading.as_frame([reading.read(stranger)]).frame
    assert frame["a"][0] == float("inf")
    assert frame["mine"][0] == f"1{'0' * 350}"


def packed(path: Path, pickled: bytes, kind: int = zipfile.ZIP_STORED, **more: bytes) -> Path:
    """A checkpoint with this pickle."""
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in {"data.pkl": pickled, "version": b"3\n", **more}.items():
            archive.writestr(f"archive/{name}", data)
    return path


def doubled(levels: int) -> bytes:
    """A pickle of a list of two, each the same list of two, ..."""
    inner = b"]q\x00."[:-1]
    for i in range(levels):
        inner = b"](" + inner + b"h" + bytes([i]) + b"eq" + bytes([i + 1])
    return b"\x80\x02" + inner + b"."


def test_a_checkpoint_stands_for_no_more_than_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    text = b"\x80\x02]" + b"X\x00\x00\x10\x00" + b" " * 2**20 + b"0" + b"."
    calls = [pickle.dumps(bytearray, 2)[:-1] + b"J\x00\x00\x00\x7f\x85R."]
    calls.append(b"\x80\x02ctorch\nTensor\nJ\x00\x00\x00\x7f\x85R.")
    for pickled, kind, reason in (
        (text, zipfile.ZIP_DEFLATED, "zipped again with compression"),
        (doubled(40), zipfile.ZIP_STORED, "more objects than a file of its size"),
        (b"\x80\x02" + b"](" * 200 + b"e" * 200 + b".", zipfile.ZIP_STORED, "nested more than 100"),
        (calls[0], zipfile.ZIP_STORED, "allocates bytes that are not in the file"),
        (calls[1], zipfile.ZIP_STORED, "allocates bytes that are not in the file"),
    ):
        assert reason in str(lookup.damage(packed(path, pickled, kind)))
    wide = torch.zeros(1).expand(2**40)
    torch.save({"state_dict": {"w": wide}}, path)
    assert "repeat their elements" in str(lookup.damage(path))
    torch.save({"state_dict": {"w": torch.ones(3)}, "history": [*range(300_000)]}, path)
    assert lookup.damage(path) is None


CONTROL = "\x1b[2J\x1b]0;owned\x07\x9b"


def test_no_control_character_of_a_file_reaches_the_terminal(
    stranger: Path, conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = stranger.with_name(f"run{CONTROL}")
    stranger.rename(name)
    notes = json.dumps(CONTROL)
    frozen(name / "config.yaml", ("notes: null", f"notes: {notes}\n{notes}: {notes}"))
    provenance.note(name, reason=CONTROL, status="failed", best=None)
    results = json.loads((name / "results.json").read_text())
    (name / "results.json").write_text(json.dumps(results | {CONTROL: 1}))
    other = shutil.copytree(name, name.with_name("other"), symlinks=True)
    (other / "results.json").unlink()
    for words in (["ls", name, other], ["show", other], ["diff", name, other], ["best", name]):
        runs.main([*map(str, words)])
    frozen(name / "config.yaml", ("seed: ", "${nope}: "))
    runs.main(["reproduce", str(name)])
    (conf / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{notes}: 1\n")
    said = refusal("experiment=theirs", conf=conf)
    said += refusal(f"resume={name}")
    out, err = capsys.readouterr()
    assert "\\x1b[2J" in out
    assert "\\x1b[2J" in said
    assert not {*CONTROL} & {*out, *err, *said} - {*"[2J]0;owned"}


def test_a_log_line_and_a_summary_obey_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    message = logging.LogRecord("harness", logging.WARNING, "", 1, f"a\n\tb {CONTROL}", (), None)
    log_file.Screen().emit(message)
    summary.show({"best": CONTROL})
    said = "".join(capsys.readouterr())
    assert "a\n\tb \\x1b[2J" in said
    assert "\x1b" not in said
