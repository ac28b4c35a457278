"""The small project of the library's tests has the files of this project."""

import re
from pathlib import Path

from template.tests.conftest import ROOT

SMALL = ROOT / "harness" / "tests" / "project"
# Its own files: a config without pictures, one more experiment, and programs with short docstrings.
ITS_OWN = {"conf/model/_classification.yaml", "conf/experiment/cnn.yaml"}
ITS_OWN |= {"train.py", "evaluate.py", "predict.py"}


def renamed(text: str) -> str:
    """A config of this project with the small one's names."""
    text = re.sub(r"project\.(models|data)\.\w+\.", r"small.\1.", text)
    return text.replace('"project"', '"small"')


def test_configs_of_the_library_s_tests_are_those_that_ship() -> None:
    paths = [*SMALL.glob("conf/**/*.yaml"), *SMALL.glob("scripts/**/*.sbatch")]
    compared = [path.relative_to(SMALL).as_posix() for path in paths]
    assert len(compared) > 20
    for path in {*compared} - ITS_OWN:
        assert (SMALL / path).read_text() == renamed((ROOT / path).read_text()), path


def test_classes_of_the_library_s_tests_are_those_that_ship() -> None:
    """Each class of its two modules equals a class of ours."""
    ours = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for path in Path(SMALL, "src").rglob("*.py"):
        for definition in re.split(r"(?m)^(?=class |def )", path.read_text())[1:]:
            assert definition.strip() in ours, definition.partition("\n")[0]
