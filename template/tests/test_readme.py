"""Every command that a page shows composes, or its options are in its program's help."""

import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from harness.command.compose import compose
from harness.testing import command
from template.tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "harness").glob("**/*.md"))]
PAGES += [ROOT / "template" / "README.md", ROOT / "AGENTS.md"]
# A page to migrate from another template shows that template's commands and files as well.
OWN_PAGES = [page for page in PAGES if not page.name.startswith("migrate_")]
# Lines that set up an environment, or that run the test suite.
SETUP = (
    *("python3 -m venv", ". .venv", "pip install", "pre-commit install", "apt install"),
    *("ruff format", "OMP_NUM_THREADS=1 pytest", "pytest -m", "python -m pytest"),
    *("tensorboard --logdir", "docker", "uv venv", "uv pip install"),
    *("copier copy", "copier update", "git clone", "kubectl"),
)
SHELL = ("(cd ", "for ", "done", "rates=", "run=", "python -c")
TASKS = {"train.py": "train", "evaluate.py": "evaluate", "predict.py": "predict"}
TASKS["scripts/slurm/train.sbatch"] = "train"  # passes its arguments on
FILES = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
PARTS = 3  # of the commands, for workers that share them
IS_ASKED = {"--help", "-sc", "…"}  # answered without a run


def own_text(page: Path) -> str:
    """Return a page's text; a page to upgrade has old names in the first column of its tables."""
    text = page.read_text()
    return re.sub(r"(?m)^\|.*?\|", "|", text) if page.name.startswith("upgrade_") else text


def commands() -> list[str]:
    """The shown lines, without what sets up an environment."""
    found = []
    for text in map(own_text, OWN_PAGES):
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [line.partition("  #")[0].strip() for line in lines]
        found += re.findall(r"`((?:python|make|torchrun|eval) [^`]+)`", text)
    lines = [re.sub(r"^(uv run --no-sync |\.venv/bin/)", "", line) for line in found]
    return sorted({line for line in lines if line and not line.startswith(("#", *SETUP, *SHELL))})


def of_programs() -> Iterator[tuple[str, list[str]]]:
    """Yield the Python programs that the lines start, by any launcher, with their arguments."""
    for line in commands():
        if line.startswith("make "):
            continue
        if inner := re.match(r'eval "\$\((.*)\)"|train=\((.*)\)$', line):
            line = inner[1] or inner[2].replace('"$@"', "")
        arguments = shlex.split(line)
        is_program = (number for number, word in enumerate(arguments) if word in TASKS)
        of_script = (number for number, word in enumerate(arguments) if word.endswith(".py"))
        of_module = (number for number, word in enumerate(arguments) if word == "-m")
        start = next(is_program, None)
        start = next(of_script, None) if start is None else start
        start = next(of_module) + 1 if start is None else start
        yield arguments[start], arguments[start + 1 :]


@pytest.mark.parametrize("part", range(PARTS))
def test_shown_words_of_the_three_commands_compose(part: int, finished_run: Path) -> None:
    """The overrides of a sweep compose as those of its first job."""
    assert len(commands()) > 50
    wrong = []
    for program, arguments in islice(of_programs(), part, None, PARTS):
        if program not in TASKS or IS_ASKED & {*arguments}:
            continue
        typed = " ".join(word for word in arguments if word != "-m")
        typed = re.sub(r"(outputs/\w+/<run>|\$run)(?=[/ ]|$)", f"{finished_run}", typed)
        typed = re.sub(
            r"\bexperiment=(mine|shapes|stars(_search)?)\b", "experiment=synthetic", typed
        )
        typed = re.sub(r"\bdata=mine data\.root=clips\b", "data=synthetic", typed)
        typed = re.sub(r"\bdata=tars data\.folder=shards model=mine\b", "model=mine", typed)
        typed = re.sub(r"\bdata=none model=<your module>", "data=none model=mlp", typed)
        typed = re.sub(
            r"\bexperiment=images data\.root=shapes data\.size=32 model=mine\b", "model=mine", typed
        )
        typed = re.sub(r"\bmodel=(linear|mine)\b", "data=synthetic model=mlp", typed)
        typed = typed.replace("sweep=stars_optuna", "sweep=optuna")
        typed = re.sub(r"=<[a-z]+>", "=there", typed)
        typed = re.sub(r"\$\{rates\[.*?\]\}", "0.1", typed)
        # The run that stands for the reader's has no such file to predict on.
        typed = re.sub(r" data\.predict_\w+=\S+", "", typed)
        if "-m" in arguments:
            typed = re.sub(r"=\S*interval\((\S+?),\S*", r"=\1", typed)
            typed = re.sub(r"=([\w.]+)(,[\w.]+)+(?= |$)", r"=\1", typed)
            typed = re.sub(r"=(\[[^] ]*\])(,\[\S*)", r"=\1", typed)
            typed = re.sub(r"=range\(\d+\)", "=0", typed)
        typed = re.sub(r"notes=(.*)$", r"'notes=\1'", typed)  # a note has spaces
        overrides = [*filter(re.compile(r"notes=|[^ ]*=").match, shlex.split(typed))]
        try:
            compose(TASKS[program], overrides)
        except Exception as error:
            wrong.append(f"{program} {' '.join(arguments)}: {error}")
    assert wrong == []


@pytest.mark.filterwarnings("default")
def test_shown_words_of_scripts_are_in_their_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for program, arguments in of_programs():
        if not program.endswith(".py") or program in TASKS:
            continue
        subcommand = arguments[:1] if program == "scripts/runs.py" else []
        monkeypatch.syspath_prepend((ROOT / program).parent)  # as for a program
        monkeypatch.setattr(sys, "argv", [program, *subcommand, "--help"])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(ROOT / program), run_name="__main__")
        printed = capsys.readouterr().out
        assert [word for word in arguments if word.startswith("-") and word not in printed] == [], (
            program
        )


def test_shown_modules_and_targets_exist() -> None:
    modules = [name for name, _ in of_programs() if not name.endswith((".py", ".sbatch"))]
    assert len(modules) > 2
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    targets = {shlex.split(line)[1] for line in commands() if line.startswith("make ")}
    result = subprocess.run(["make", "-n", *targets - {"UV="}], cwd=ROOT, capture_output=True)
    assert result.returncode == 0, result.stderr


def test_every_file_that_a_page_names_exists() -> None:
    named = [(page, path) for page in OWN_PAGES for path in named_paths(own_text(page))]
    assert len(named) > 100
    wrong = [(page.name, path) for page, path in named if not is_there(page, path)]
    assert wrong == []


def test_every_part_of_a_page_that_a_link_names_is_there() -> None:
    wrong = []
    for page in PAGES:
        for target, part in re.findall(r"\]\(([\w./]*)#([^)]*)\)", page.read_text()):
            file = next(
                (place / target for place in places(page) if (place / target).is_file()), page
            )
            headings = re.findall(r"(?m)^#+ (.*)$", file.read_text())
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings]
            wrong += [(page.name, target, part)] if part not in slugs else []
    assert wrong == []


# These look like paths, but a run or the reader makes them, or they name something else.
NO_FILES = re.compile(
    r"(train|val|test|build|gpu|throughput|outputs|checkpoints|git|Linux|data/flowers|model/scheduler)(/|$)"
    r"|(config|overrides)\.yaml$|.*(mine|linear|shapes\.yaml)"
)


def named_paths(text: str) -> Iterator[str]:
    """Yield the paths in backticks and in links."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    paths = re.findall(r"`([\w.-]+(?:/[\w.-]*)+|[\w-]+\.(?:py|md|yaml|toml|sbatch))`", text)
    paths += re.findall(r"\]\(([\w./-]+)(?:#[^)]*)?\)", text)
    return (path for path in paths if not NO_FILES.match(path))


def places(page: Path) -> tuple[Path, ...]:
    """The folders that paths of a page start from."""
    library = ROOT / "harness" / "src" / "harness"
    return page.parent, ROOT, ROOT / "harness", library, library / "conf", ROOT / "conf"


def is_there(page: Path, path: str) -> bool:
    """A file or folder below one of the places; or a file of that name alone, anywhere."""
    below = any((place / path).exists() for place in places(page))
    return below or ("/" not in path and any(name.rsplit("/")[-1] == path for name in FILES))


@pytest.mark.slow
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
    arguments = ("data=synthetic", "model=linear", "trainer.max_epochs=1")
    arguments += (
        f"hydra.searchpath=[file://{tmp_path}/conf]",
        f"output_dir={tmp_path / 'outputs'}",
    )
    environment = {"PYTHONPATH": str(tmp_path), "YAML_ALLOWED": "linear"}
    result = command("train.py", *arguments, environment=environment)
    assert result.returncode == 0, result.stderr
    assert "test/accuracy" in result.stdout


def test_notebook_of_the_readme_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The page's lines for a notebook or a script, where conf/ is."""
    text = (ROOT / "README.md").read_text()
    (lines,) = re.findall(
        r"```python\n((?:(?!```).)*from harness import train.*?)```", text, re.DOTALL
    )
    lines = lines.replace('max_epochs=3"', f'max_epochs=1", "output_dir={tmp_path}"')
    names: dict[str, object] = {}
    exec(lines, names)
    assert names["logits"].shape == (5, 10)  # type: ignore[attr-defined]
    assert str(tmp_path) in capfd.readouterr().out
