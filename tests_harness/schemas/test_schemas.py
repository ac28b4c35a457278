"""Editors know every key of conf/, and underline one that nothing takes."""

import enum
import fnmatch
import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from omegaconf import OmegaConf

from harness.errors import UserError
from harness.schemas.files import FOLDER, schemas
from harness.schemas.signatures import of_target
from tests_harness.conftest import ROOT

CONF = ROOT / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
SETTINGS: dict[str, Any] = json.loads((ROOT / ".vscode/settings.json").read_text())["yaml.schemas"]
OPTIONAL = ("timm.", "hydra_plugins.")  # not of the lock


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """The schemas as the lock's packages make them, whatever else is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "harness.schemas.files.of_target",
            lambda target: None if target.startswith(OPTIONAL) else of_target(target),
        )
        return schemas(CONF)[0]


def schema_of(path: Path) -> list[str]:
    """The schemas that VS Code takes for a file."""
    name = str(path.relative_to(ROOT))
    return [
        place.removeprefix(f"{FOLDER}/")
        for place, globs in SETTINGS.items()
        for glob in ([globs] if isinstance(globs, str) else globs)
        # A star of an editor's pattern stays within a folder.
        if fnmatch.fnmatch(name, glob) and name.count("/") == glob.count("/")
    ]


def errors(made: dict[str, Any], path: Path, value: Any) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    referencing = pytest.importorskip("referencing")
    registry = referencing.Registry().with_resources(
        (name, referencing.Resource.from_contents(schema)) for name, schema in made.items()
    )
    (name,) = schema_of(path)
    validator = jsonschema.Draft7Validator(made[name], registry=registry)
    return [error.message for error in validator.iter_errors(value)]


def test_written_schemas_are_current(made: dict[str, Any]) -> None:
    """Else: python scripts/schemas.py"""
    if not (ROOT / FOLDER).exists():
        pytest.skip("this project has not made its schemas")
    lock = (ROOT / "requirements.lock").read_text()
    for name in ("torch", "pytorch-lightning"):
        if f"\n{name}=={metadata.version(name).partition('+')[0]}\n" not in lock:
            pytest.skip(f"another {name} than the lock's has other signatures")
    written = {path.name: json.loads(path.read_text()) for path in (ROOT / FOLDER).iterdir()}
    assert written.keys() == made.keys()
    assert [name for name in made if written[name] != made[name]] == [], "python scripts/schemas.py"


def test_schemas_are_schemas(made: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for schema in made.values():
        jsonschema.Draft7Validator.check_schema(schema)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_every_file_has_one_schema_and_keeps_it(path: Path, made: dict[str, Any]) -> None:
    assert len(schema_of(path)) == 1, "a line in .vscode/settings.json is missing"
    value = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert errors(made, path, value) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("experiment/new.yaml", "trainer: {max_epoch: 3}"),
        ("experiment/new.yaml", "trainer: {max_epochs: three}"),
        ("experiment/new.yaml", "trianer: {max_epochs: 3}"),
        ("experiment/new.yaml", "data: {batchsize: 3}"),
        ("experiment/new.yaml", "model: {optimizer: {lrr: 3}}"),
        ("experiment/new.yaml", "model: {optimizer: {_target_: torch.optim.SGD, momentun: 0.9}}"),
        ("experiment/new.yaml", "model: {net: {hidden: [3, four]}}"),
        ("experiment/new.yaml", "callbacks: {early_stopping: {patienc: 1}}"),
        ("experiment/new.yaml", "checkpoint: {num_keep: 1}"),
        ("experiment/new.yaml", "init: {path: weights.pth, freez: []}"),
        ("experiment/new.yaml", "defaults: {override /data: synthetic}"),
        ("model/new.yaml", "{_target_: project.models.classifier.Classifier, anything: 3}"),
        ("model/new.yaml", "net: {_target_: project.models.mlp.MLP, hiddn: [3]}"),
        ("model/new.yaml", "nett: {_target_: project.models.mlp.MLP, hidden: [3]}"),
        ("data/new.yaml", "{_target_: harness.images.datamodule.Images, root: 3}"),
        ("data/new.yaml", "{_target_: project.data.synthetic.Synthetic, batchsize: 3}"),
        ("strategy/new.yaml", "device: 1"),
        ("gpus/new.yaml", "orders: visible"),
        ("logger/new.yaml", "csv: {_target_: harness.loggers.metrics_table.MetricsTable, pth: x}"),
        ("trainer/new.yaml", "{_target_: pytorch_lightning.Trainer, max_epoc: 1}"),
    ],
)
def test_a_mistake_is_underlined(file: str, text: str, made: dict[str, Any]) -> None:
    assert errors(made, CONF / file, yaml.safe_load(text))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "experiment/new.yaml",
            "trainer: {max_epochs: '${data.n}', precision: '???'}",
        ),
        ("experiment/new.yaml", "{defaults: [{override /data: newer}, _self_], data: null}"),
        ("experiment/new.yaml", "model: {optimizer: {_target_: torch.optim.SGD, _partial_: true}}"),
        ("experiment/new.yaml", "callbacks: {mine: {_target_: my.own.Callback, anything: 1}}"),
        ("experiment/new.yaml", "callbacks: {progress_bar: null}"),
        ("experiment/new.yaml", "hydra: {job: {name: mine}}"),
        ("model/new.yaml", "{_target_: my.own.Model, anything: 3, net: {_target_: my.Net, b: 2}}"),
        ("model/new.yaml", "net: {_target_: project.models.mlp.MLP, _args_: [4], hidden: '???'}"),
        ("model/new.yaml", "net: {_target_: project.models.mlp.MLP, in_features: from_data.a}"),
    ],
)
def test_what_hydra_takes_is_not_underlined(file: str, text: str, made: dict[str, Any]) -> None:
    assert errors(made, CONF / file, yaml.safe_load(text)) == []


def test_hints_and_docstrings_of_a_class_are_told() -> None:
    schema = of_target("project.models.resnet.ResNet")
    assert schema is not None
    block = schema["properties"]["block"]
    assert {"enum": ["basic", "bottleneck"]} in block["anyOf"]
    assert "two 3x3 convolutions" in block["description"]
    assert schema["properties"]["width"]["default"] == 64
    sgd = of_target("torch.optim.SGD")
    assert sgd is not None
    assert "momentum factor" in sgd["properties"]["momentum"]["description"]
    assert of_target("project.models.no_such.Thing") is None


class Kind(enum.Enum):
    ONE = 1


class Odd:
    def __init__(
        self,
        clip: float = math.inf,
        seed: int = None,  # type: ignore[assignment]  # noqa: RUF013
        kind: Literal[Kind.ONE] = Kind.ONE,
    ) -> None: ...


def test_odd_defaults_and_hints_are_left_open() -> None:
    """Infinity is no JSON, and one such value would take the schemas of all files away."""
    schema = of_target(f"{__name__}.Odd")
    assert schema is not None
    json.dumps(schema, allow_nan=False)
    taken = schema["properties"]
    assert "default" not in taken["clip"]
    assert {"type": "null"} in taken["seed"]["anyOf"]
    assert taken["kind"] == {}


class Base:
    def __init__(self, size: int, name: str = "a") -> None:
        """Args: size: of it."""


class HandsOn(Base):
    def __init__(self, depth: int, **kwargs: Any) -> None:
        super().__init__(name="b", **kwargs)


class Looks(Base):
    def __init__(self, **kwargs: Any) -> None:
        self.width = kwargs.pop("width", 1)
        super().__init__(**kwargs)


@pytest.mark.parametrize(
    ("name", "takes", "is_open"), [("HandsOn", {"depth", "size"}, False), ("Looks", set(), True)]
)
def test_arguments_that_are_handed_on_are_those_of_the_base(
    name: str, takes: set[str], is_open: bool
) -> None:
    schema = of_target(f"{__name__}.{name}")
    assert schema is not None
    assert {key for key in schema["properties"] if key[0] != "_"} - {"defaults"} == takes
    assert schema["additionalProperties"] is is_open


def test_comments_are_told_where_a_file_leaves_the_target_out(
    made: dict[str, Any],
) -> None:
    whole = made["conf.json"]["properties"]
    assert whole["objective"]["description"].startswith("the logged value")
    batch_size = whole["data"]["else"]["properties"]["batch_size"]
    assert batch_size["description"].startswith("samples per optimizer step")


def test_a_typo_of_an_experiment_is_not_learned(tmp_path: Path) -> None:
    """The next time that the schemas are made, it would pass."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "train.yaml").write_text("seed: 1\n")
    typo = "# @package _global_\nsead: 2\nmine: {_target_: torch.nn.ReLU}\n"
    (tmp_path / "experiment" / "a.yaml").write_text(typo)
    keys = schemas(tmp_path)[0]["conf.json"]["properties"]
    assert keys.keys() == {"defaults", "seed", "mine"}


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("seed: [1\n")
    with pytest.raises(UserError, match=r"train.yaml: .*a \[ is not closed"):
        schemas(tmp_path)
