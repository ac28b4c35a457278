"""A run's network runs elsewhere, with any batch size, or a message refuses it."""

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness import Run, UserError, targets, train
from harness.export import Network, export, first_call
from harness.testing import command
from tests.conftest import LIBRARY, ROOT, slow
from tests.workers.odd_networks import Odd

ort: Any = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

BRIEF = (
    *("strategy=cpu", "logger=none", "test=false", "trainer.max_epochs=1"),
    *("trainer.enable_progress_bar=false", "trainer.limit_train_batches=2"),
    "trainer.limit_val_batches=1",
)
ODD = "{_target_: tests.workers.odd_networks.Odd, in_features: 64, num_classes: 10}"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a network whose forward ``Odd.kind`` changes."""
    folder = tmp_path_factory.mktemp("odd")
    words = ("data=synthetic", "model=mlp", "~model.net", f"+model.net={ODD}")
    return train(*words, *BRIEF, f"output_dir={folder}", conf=ROOT / "conf")


EXAMPLES = {
    "numbers": ("experiment=table",),
    "batch norm": ("data=synthetic", "model=resnet", "model.net.norm=batch"),
    "text": ("experiment=text",),
}


@pytest.mark.parametrize("kind", ["numbers", *slow("batch norm", "text")])
def test_files_compute_what_the_network_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(*EXAMPLES[kind], *BRIEF, f"output_dir={tmp_path}", conf=ROOT / "conf")
    monkeypatch.setattr(targets, "_allowed_names", ())  # as in a process that has read no rules yet
    lines = export(run.folder, conf=ROOT / "conf")
    folder = run.folder / "checkpoints"
    files = [str(folder / "best.pt2"), str(folder / "best.onnx")]
    assert [line.partition("  ")[0] for line in lines] == files
    said = re.search(r"MB; (\w+) torch.(\w+) \(batch, ([\d, ]+)\)$", lines[1])
    assert said
    shape = [int(size) for size in said[3].split(", ")]
    torch.manual_seed(0)
    for size in (1, 5):
        x = torch.randint(0, 2, (size, *shape)).to(getattr(torch, said[2]))
        with torch.no_grad():
            expected = getattr(run.model, "exported", run.model)(x)
        loaded = torch.export.load(folder / "best.pt2").module()
        torch.testing.assert_close(loaded(x), expected)
        session = ort.InferenceSession(folder / "best.onnx")
        (found,) = session.run(None, {said[1]: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)
    if kind == "numbers":  # in the targets' units
        model: Any = run.model
        assert model.target_mean.abs() > 10
        torch.testing.assert_close(expected, model.in_units(model(x)).detach())


def test_what_cannot_be_exported_is_told_in_a_line_and_not_written(
    odd: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted((odd.folder / "checkpoints").iterdir())
    for kind, said in {
        "decides": r"odd_networks.py:\d+ in forward: Could not guard on data-dependent",
        "fixed size": "Classifier cannot be exported: Constraints violated",
        "squeezes": "best.pt2 was not written: batch size 1 fails: Dimension out",
        "draws": "batch size 64 fails: Tensor-likes are not close! .* absolute difference: ",
        "not in ONNX": "best.onnx was not written: .*_linalg_eigh",
    }.items():
        monkeypatch.setattr(Odd, "kind", kind)
        with pytest.raises(UserError, match=said) as told:
            export(odd.folder, conf=ROOT / "conf")
        assert "\n" not in str(told.value)
        assert sorted((odd.folder / "checkpoints").iterdir()) == before  # not the first of two


def test_a_file_with_other_weights_is_not_written_nor_one_with_samples(
    odd: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(odd.folder, [tmp_path / "good.pt2"], conf=ROOT / "conf")
    with zipfile.ZipFile(tmp_path / "good.pt2") as archive:
        sizes = {Path(member.filename).parts[-2:]: member for member in archive.infolist()}
    assert sizes["sample_inputs", "model.pt"].file_size == 0
    original = torch.export.export

    def harmed(network: Any, *args: Any, **kwargs: Any) -> Any:
        program = original(network, *args, **kwargs)
        weight = program.state_dict["module.net.layer.weight"]
        program.state_dict["module.net.layer.weight"] = torch.nn.Parameter(weight * 1.01)
        return program

    monkeypatch.setattr(torch.export, "export", harmed)
    for name in ("net.pt2", "net.onnx"):
        with pytest.raises(UserError, match="was not written: batch size 64 fails"):
            export(odd.folder, [tmp_path / name], conf=ROOT / "conf")
    assert [path.name for path in tmp_path.iterdir()] == ["good.pt2"]
    for name, said in (
        ("net.pt", "must end in .pt2 or .onnx"),
        ("good.pt2", "--force replaces it"),
    ):
        with pytest.raises(UserError, match=said):
            export(odd.folder, [tmp_path / name], conf=ROOT / "conf")


class Bare(pl.LightningModule):
    """Has no forward; what its network is called with changes."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.call = nn.Bilinear(2, 2, 3), call

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.call(self.net, batch[0])

    def test_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)


def test_a_module_without_forward_gives_its_only_child_as_a_test_calls_it() -> None:
    for model in (
        Bare(lambda net, x: net(x, input2=2 * x)),
        Bare(lambda net, x: net.forward(x, 2 * x)),  # which calls no hook
    ):
        module, inputs = first_call(model, None)
        assert module is model.net
        sums = {name: tensor.sum() for name, tensor in inputs.items()}
        assert sums == {"input1": 8, "input2": 16}
        assert "forward" not in vars(module)
    with pytest.raises(UserError, match=r"Bare never calls self\(...\) in test_step"):
        first_call(Bare(lambda net, x: None), None)


class ByName(pl.LightningModule):
    """Is called with a dictionary of tensors, as Hugging Face's networks are; has no test."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Embedding(7, 3)

    def forward(self, **inputs: Any) -> Any:
        found = self.net(inputs["input_ids"]) * inputs["attention_mask"][..., None]
        return {"loss": (found.mean(1) - inputs["labels"]).sum()} if "labels" in inputs else found

    def call(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self(**batch)

    def loader(self) -> Any:
        names = {"attention_mask": torch.ones(5).long(), "input_ids": torch.arange(5)}
        return DataLoader([{**names, "labels": torch.ones(3)}] * 4, batch_size=2)


class ByNameOnly(ByName):
    """Names the tensors that count."""

    def exported(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self(input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize("stage", ["validation", "predict"])
def test_a_module_without_a_test_is_called_as_in_another_stage(stage: str, monkeypatch) -> None:
    """Tensors are passed by name, and `exported` leaves some out."""
    for module, names in (
        (ByName, ["attention_mask", "input_ids", "labels"]),
        (ByNameOnly, ["input_ids", "attention_mask"]),
    ):
        monkeypatch.setattr(ByName, f"{stage}_step", ByName.call, raising=False)
        loader = f"{'val' if stage == 'validation' else stage}_dataloader"
        monkeypatch.setattr(ByName, loader, ByName.loader, raising=False)
        model, inputs = first_call(module(), None)
        assert [*inputs] == names
        found = Network(model, [*inputs])(*inputs.values())
        if module is ByNameOnly:
            torch.testing.assert_close(found, model.net(inputs["input_ids"]))


def test_other_arguments_than_tensors_are_answered_with_the_method_to_write(monkeypatch) -> None:
    monkeypatch.setattr(ByName, "test_dataloader", ByName.loader, raising=False)

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self(**batch, return_dict=True)

    monkeypatch.setattr(ByName, "test_step", step, raising=False)
    said = r"network: return_dict\..*\n.* exported\(self, attention_mask, input_ids, labels\) that"
    with pytest.raises(UserError, match=said):
        first_call(ByName(), None)
    assert [*first_call(ByNameOnly(), None)[1]] == ["input_ids", "attention_mask"]


@pytest.mark.slow
def test_lines_of_the_page_load_what_the_command_wrote(finished_run: Path, tmp_path: Path) -> None:
    outputs = [word for suffix in ("pt2", "onnx") for word in ("-o", tmp_path / f"best.{suffix}")]
    (tmp_path / "best.pt2").touch()
    done = command("scripts/export.py", finished_run, *outputs, "--force")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 2
    page = (LIBRARY / "docs" / "checkpoints.md").read_text()
    page = page.partition("## Files for other programs")[2]
    for lines in re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]:
        code = lines.replace("best.", f"{tmp_path}/best.") + "\nassert outputs.shape == (5, 10)\n"
        exec(code, {"inputs": torch.rand(5, 1, 8, 8)})
