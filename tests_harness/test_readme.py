"""Every command that a page shows is run, or composed where it would train."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from harness.testing import command as typed
from tests_harness.conftest import ROOT
from tests_harness.faults.fork_server import command

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "template" / "README.md", ROOT / "AGENTS.md"]
# Commands whose work is what the suite itself is run by.
SETUP = (
    *("python3 -m venv", ". .venv", "pip install", "pre-commit install", "apt install"),
    *("ruff format", "OMP_NUM_THREADS=1 pytest", "pytest -m", "tensorboard --logdir"),
    *("docker", "uv venv", ".venv/bin/python -m pytest"),
)
# Commands for machines of a cluster; tests_harness/cluster starts the like of them.
CLUSTER = ("srun", "sbatch", "NODE_RANK=")


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [line.partition("  #")[0].strip() for line in lines]
        found += re.findall(r"`((?:python|make|torchrun|eval) [^`]+)`", page.read_text())
    return sorted({line for line in found if line and not line.startswith("#")})


def test_pages_show_commands() -> None:
    assert len(commands()) > 15


@pytest.mark.parametrize("line", commands())
def test_shown_command_works(line: str, finished_run: Path) -> None:
    if line.startswith((*SETUP, *CLUSTER)) or "<this repository>" in line:
        pytest.skip("part of setting up, or of a cluster")
    if inner := re.match(r'eval "\$\((.*)\)"', line):
        line = inner[1]
    line = re.sub(r"^(uv run --no-sync |\.venv/bin/)", "", line)
    line = re.sub(r"outputs/\w+/<run>", str(finished_run), line)
    line = re.sub(r"\bexperiment=mine\b", "experiment=synthetic", line)
    line = re.sub(r"\bmodel=(linear|mine)\b", "data=synthetic model=mlp", line)
    # The run that stands for the reader's has no such file to predict on.
    line = re.sub(r" data\.predict_\w+=\S+", "", line)
    words = shlex.split(line)
    if words[0] == "make":
        result = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True)
        assert result.returncode == 0
        return
    if words[1] == "-m":
        assert command(*words[1:3], "--help").returncode == 0
        return
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    arguments = words[script + 1 :]
    if words[script] in ("train.py", "evaluate.py", "predict.py"):
        if not {"--help", "-sc"} & set(arguments):
            if "-m" in arguments:  # its first job
                arguments = [re.sub(r"=.*interval\((\S+?),.*", r"=\1", w) for w in arguments]
                arguments = [re.sub(r"=([\w.]+)(,[\w.]+)+$", r"=\1", w) for w in arguments]
                arguments = [re.sub(r"=(\[[^]]*\])(,\[.*)$", r"=\1", w) for w in arguments]
            arguments = [word for word in arguments if word != "-m"] + ["--cfg", "job"]
    else:
        arguments = ["--help"]
    result = command(words[script], *arguments)
    assert result.returncode == 0, result.stderr


def test_every_file_that_a_page_names_exists() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"[(`]((?:conf|docs|scripts|tests|src)/[\w./]+)[)`]", pages))
    made = {name for name in named if "mine" in name or "linear" in name}  # by the reader
    assert len(named) > 5
    assert [name for name in sorted(named - made) if not (ROOT / name).exists()] == []


def test_readme_network_trains(tmp_path: Path) -> None:
    """The page's own example, typed as it says, in a copy of the project."""
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    config = re.search(r"```yaml\n(# One linear.*?)```", text, re.DOTALL)
    assert code
    assert config
    (tmp_path / "linear.py").write_text(code[1])
    (tmp_path / "conf" / "model").mkdir(parents=True)
    yaml = config[1].replace("project.models.linear", "linear")
    (tmp_path / "conf" / "model" / "linear.yaml").write_text(yaml)
    result = typed(
        "train.py",
        *("--config-dir", tmp_path / "conf"),
        *(
            "data=synthetic",
            "model=linear",
            "trainer.max_epochs=1",
            f"output_dir={tmp_path / 'outputs'}",
        ),
        environment={"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert "test/accuracy" in result.stdout


def test_notebook_of_the_readme_runs(tmp_path: Path) -> None:
    """The page's lines for a notebook or a script, typed as it says, where conf/ is."""
    text = (ROOT / "README.md").read_text()
    (lines,) = re.findall(
        r"```python\n((?:(?!```).)*from harness import train.*?)```", text, re.DOTALL
    )
    lines = lines.replace('max_epochs=3"', f'max_epochs=1", "output_dir={tmp_path}"')
    result = command("-c", f"{lines}\nassert logits.shape == (5, 10)")
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout
