"""Write the page of all commands: the text that each prints for ``--help``.

The three commands of the root print their groups for ``--help``, so the page adds the examples of
their docstrings.
"""

import ast
import os
import re
import runpy
import sys
from contextlib import chdir, redirect_stdout, suppress
from io import BytesIO, TextIOWrapper
from unittest import mock

from template.site.markdown import ROOT, fenced, first_comment

MAIN = ("train.py", "evaluate.py", "predict.py")
# Files that are described by their first comment, and what the page has before it.
FILES = {
    "scripts/slurm/train.sbatch": "## `scripts/slurm/train.sbatch`\n",
    "Makefile": "## `make`\n",
    "template/site/docs.mk": "Only the template's repository has these targets:\n",
    "harness/benchmarks/bench.mk": "",
    "harness/tests/packages/packages.mk": "",
}
PROJECT = "## Make a project\n\n`copier copy` asks for the answers, and runs this program.\n"


def write() -> str:
    """Return the page."""
    scripts = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("scripts/*.py"))
    parts = [*map(section, [*MAIN, *scripts])]
    for path, before in FILES.items():
        parts += [before, fenced("\n".join(first_comment(ROOT / path)))]
    return "\n".join(filter(None, [*parts, PROJECT, fenced(printed("template/make_project.py"))]))


def section(program: str) -> str:
    """Return the heading of a program, what its help lacks, and its help."""
    docstring = ast.get_docstring(ast.parse((ROOT / program).read_text())) or ""
    first = docstring.partition("\n")[0]
    parts = [f"## `{program}`\n"]
    if program in MAIN:
        examples = [line for line in docstring.splitlines() if line.startswith("python ")]
        parts += [f"{first}\n", fenced("\n".join(examples))]
    elif module := re.search(r"`python -m [\w.]+`", first):
        parts.append(f"{module[0]} is the same command.\n")
    return "\n".join([*parts, fenced(printed(program))])


def printed(program: str) -> str:
    """Return what a program prints for ``--help``, run in this process, which has torch."""
    output = TextIOWrapper(BytesIO())
    environment = mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1")
    arguments = mock.patch.object(sys, "argv", [program, "--help"])
    with chdir(ROOT), environment, arguments, redirect_stdout(output), suppress(SystemExit):
        runpy.run_path(program, run_name="__main__")
    output.seek(0)
    return output.read().strip()
