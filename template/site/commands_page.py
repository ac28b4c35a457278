"""Write the page of all commands: the text that each prints for ``--help``.

In: the programs of a project. Out: Markdown. The three commands of the root print their groups
for ``--help``, so their docstrings follow.
"""

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from template.site.yaml_keys import ROOT

HEAD = """# Commands

This page has the help of each command. A project has all of them, except those of the last
section.

`train.py`, `evaluate.py` and `predict.py` take overrides: [config keys](config.md) lists them. A
mistake in a command ends with an error of one to three lines, and the exit status 1.
"""
MAIN = ("train.py", "evaluate.py", "predict.py")
PACKAGES = "harness/tests/packages/packages.mk"
OF_TEMPLATE = ("template/make_project.py",)
WIDTH = 100


def write() -> str:
    """Return the page."""
    scripts = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("scripts/*.py"))
    programs = (*MAIN, *scripts, *OF_TEMPLATE)
    with ThreadPoolExecutor(2) as pool:  # each waits for a process
        texts = dict(zip(programs, pool.map(printed, programs), strict=True))
    parts = [HEAD, *(section(program, texts[program]) for program in (*MAIN, *scripts))]
    parts.append("## `scripts/slurm/train.sbatch`\n")
    parts.append(f"```\n{first_comment(ROOT / 'scripts' / 'slurm' / 'train.sbatch')}\n```\n")
    parts.append("## `make`\n")
    parts.append(f"```\n{first_comment(ROOT / 'Makefile')}\n```\n")
    parts.append("Only the template's repository has these targets:\n")
    for path in ("template/site/docs.mk", "harness/benchmarks/bench.mk", PACKAGES):
        parts.append(f"```\n{first_comment(ROOT / path)}\n```\n")
    parts.append(
        "## Make a project\n\n`copier copy` asks for the answers, and runs this program.\n"
    )
    parts += [f"```\n{texts[program]}\n```\n" for program in OF_TEMPLATE]
    return "\n".join(parts)


def section(program: str, text: str) -> str:
    """Return the heading of a program, its docstring if its help lacks it, and its help."""
    docstring = ast.get_docstring(ast.parse((ROOT / program).read_text())) or ""
    first = docstring.partition("\n")[0]
    about = re.sub(r": `python -m [\w.]+` by another name\.", ".", first)
    parts = [f"## `{program}`\n", f"{about}\n"] if program in MAIN else [f"## `{program}`\n"]
    if program in MAIN:
        examples = [line for line in docstring.splitlines() if line.startswith("python ")]
        parts.append("```\n" + "\n".join(examples) + "\n```\n")
    elif module := re.search(r"`(python -m [\w.]+)`", first):
        parts.append(f"`{module[1]}` is the same command.\n")
    return "\n".join([*parts, f"```\n{text}\n```\n"])


def printed(program: str) -> str:
    """Return what a program prints for ``--help``."""
    environment = os.environ | {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, program, "--help"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"python {program} --help failed:\n{result.stderr}")
    return result.stdout.strip().replace(f"{ROOT}/", "")


def first_comment(path: Path) -> str:
    """Return the comment at the beginning of a file, without the line that names its shell."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(("#!", "#SBATCH")):
            lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)
