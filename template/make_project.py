"""Make a project out of this template: what `copier copy` runs.

    python template/make_project.py ../my-study --name my-study --package my_study
    python template/make_project.py --help

The harness keeps its name and goes over as it is. In the files of the owner, the package gets its
name in imports, `_target_`s and paths; README, licence and pyproject.toml get the answers. Files
that the template does not have are left alone, so that a project can also be updated. Needs Python
3.10 and git; nothing has to be installed.
"""

import argparse
import json
import keyword
import re
import stat
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "project"  # its name in this repository
# What no project gets: that of the template itself, and what is written anew below.
LEFT_OUT = (
    *("template", "copier.yml", ".github/ISSUE_TEMPLATE", ".github/pull_request_template.md"),
    *("harness/benchmarks", "harness/tests/test_benchmarks.py", "harness/tests/packages"),
    *(".ci/versions", ".github/workflows/versions.yaml"),
    *("harness/docs/terminal.py", "harness/docs/terminal.svg"),
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "README.md", "LICENSE"),
)
HARNESS_TESTS = "harness/tests"
# An example's files carry its name, and no other file needs them: digits_cnn.yaml, test_digits.py.
EXAMPLES = ("digits", "contrastive")
# The files that may name the package.
ROOMS = (f"src/{PACKAGE}/", "tests/", "conf/", "scripts/")
ENTRIES = ("train.py", "evaluate.py", "predict.py", "pyproject.toml", "AGENTS.md")
LICENSES = sorted(path.stem for path in (ROOT / "template" / "licenses").glob("*.txt"))
# Modules of locked distributions that have other names than these; a test looks at them.
OTHER_MODULES = {
    *("PIL", "absl", "antlr4", "attr", "dateutil", "example", "functorch", "google", "grpc"),
    *("hydra", "hydra_plugins", "isympy", "lightning_fabric", "markdown_it", "mpl_toolkits"),
    *("mypyc", "py", "pydevd_plugins", "pylab", "pynvml", "sklearn", "torchgen", "xdist", "yaml"),
    *("pip", "setuptools", "pkg_resources", "wheel"),
}


class File(NamedTuple):
    """What a file holds, and its permissions."""

    data: bytes
    mode: int = 0o644


Files = dict[str, File]  # by path below the root, with forward slashes


def main() -> None:
    """Write the project that the arguments describe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the project goes")
    parser.add_argument("--name", required=True, help="for pip and the README's title: my-study")
    parser.add_argument("--package", required=True, help="for import: my_study")
    parser.add_argument("--description", default="", help="one line")
    parser.add_argument("--author", default="", help="who holds the copyright")
    parser.add_argument("--license", choices=[*LICENSES, "none"], default="MIT")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--examples", action=flag, default=True, help=" and ".join(EXAMPLES))
    parser.add_argument("--harness-tests", action=flag, default=False, help="minutes of tests")
    parser.add_argument("--git", action=flag, help="start a repository with a first commit")
    answers = parser.parse_args()
    template = read(ROOT)
    check_package(answers.package, template)
    check_name(answers.name, template)
    files = make(template, answers)
    refuse_to_overwrite(answers.folder, files)
    write(answers.folder, files)
    if answers.git and not (answers.folder / ".git").exists():
        start_repository(answers.folder)


def read(root: Path) -> Files:
    """Read every file that git knows or would take; what it ignores stays out."""
    command = ["git", "-C", str(root), "ls-files", "-z", "-c", "-o", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        sys.exit(listed.stderr.strip())
    paths = [root / name for name in listed.stdout.split("\0") if name]
    return {
        path.relative_to(root).as_posix(): File(
            path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
        )
        for path in paths
        if path.is_file() and not path.is_symlink()
    }


def write(folder: Path, files: Files) -> None:
    """Write files below a folder; others that it has are left alone."""
    for path, file in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.data)
        target.chmod(file.mode)


def check_package(name: str, template: Files) -> None:
    """Exit with the reason where ``name`` cannot be the name of the package."""
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", name):
        sys.exit(
            f"{name!r} is not a name that Python can import and pip can install: "
            "use letters, numbers and underscores, such as my_study."
        )
    taken = OTHER_MODULES | {distribution.replace("-", "_") for distribution in locked(template)}
    taken |= {path.removeprefix("src/").split("/")[0].removesuffix(".py") for path in template}
    reasons = {
        "a keyword of Python": set(keyword.kwlist),
        "a module of Python's standard library": set(sys.stdlib_module_names),
        "a dependency, or a file or folder of the project": taken - {PACKAGE},
    }
    for reason, names in reasons.items():
        if name.lower() in {other.lower() for other in names}:
            sys.exit(f"{name} is {reason}. Use another name, such as {name}_study.")


def check_name(name: str, template: Files) -> None:
    """Exit where pip would refuse the name, or take the project for a dependency of its own."""
    if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", name, re.ASCII):
        sys.exit(f"{name!r} is not a name for pip: use letters, numbers and hyphens: my-study.")
    if normalized(name) in locked(template) | {"pip", "setuptools", "wheel"}:
        sys.exit(f"{name} is a dependency of the project. Use another name, such as {name}-study.")


def locked(template: Files) -> set[str]:
    """Names of the distributions in requirements.lock."""
    lock = template["requirements.lock"].data.decode()
    return {normalized(line.partition("==")[0]) for line in lock.splitlines()}


def normalized(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def make(template: Files, answers: argparse.Namespace) -> Files:
    """Return the files of the project."""
    left_out = LEFT_OUT if answers.harness_tests else (*LEFT_OUT, HARNESS_TESTS)
    names_package = package_pattern(template)
    files: Files = {}
    for path, file in template.items():
        if any(path == own or path.startswith(f"{own}/") for own in left_out):
            continue
        if is_example(path) and not answers.examples:
            continue
        if path.startswith(ROOMS) or path in ENTRIES:
            data = re.sub(names_package, answers.package.encode(), file.data)
            file = file._replace(data=data)
            path = path.replace(f"src/{PACKAGE}/", f"src/{answers.package}/")
        files[path] = file
    return files | with_answers(files, answers)


def is_example(path: str) -> bool:
    """Whether a file belongs to an example, by its name."""
    return re.match(rf"(test_)?({'|'.join(EXAMPLES)})(_|\.)", Path(path).name) is not None


def package_pattern(template: Files) -> re.Pattern[bytes]:
    """Where the package is named: in dotted names, imports and paths, and alone in quotes."""
    inside = f"src/{PACKAGE}/"
    below = {path.removeprefix(inside) for path in template if path.startswith(inside)}
    modules = "|".join(sorted({name.split("/")[0].removesuffix(".py") for name in below}))
    pattern = (
        rf"(?<![\w./-]){PACKAGE}(?=\.({modules})\b)"
        rf"|(?<=\bfrom ){PACKAGE}(?= import\b)|(?<=\bimport ){PACKAGE}\b"
        rf"|(?<=\bsrc/){PACKAGE}\b|(?<=\"){PACKAGE}(?=\")"
    )
    return re.compile(pattern.encode())


def with_answers(files: Files, answers: argparse.Namespace) -> Files:
    """Return the files that hold name, description, author and licence."""
    author = answers.author or f"The {answers.name} authors"
    pyproject, quoted = files["pyproject.toml"].data.decode(), json.dumps
    values = {
        "name": [f"name = {quoted(answers.name)}"],
        "version": ['version = "0.1.0"'],
        "description": [
            f"description = {quoted(answers.description or answers.name, ensure_ascii=False)}"
        ],
        "license": [f"license = {quoted(answers.license)}"] * (answers.license != "none")
        + [f"authors = [{{ name = {quoted(author, ensure_ascii=False)} }}]"],
    }
    for key, lines in values.items():
        line = re.compile(rf'(?m)^{key} = ".*"$')
        pyproject = line.sub(lambda _, lines=lines: "\n".join(lines), pyproject, count=1)
    readme = Template((ROOT / "template" / "README.md").read_text()).substitute(
        name=answers.name, package=answers.package, description=answers.description
    )
    texts = {"pyproject.toml": pyproject, "README.md": re.sub(r"\n{3,}", "\n\n", readme)}
    if answers.license != "none":
        terms = (ROOT / "template" / "licenses" / f"{answers.license}.txt").read_text()
        texts["LICENSE"] = terms.replace("<author>", author)
    return {path: File(text.encode()) for path, text in texts.items()}


def refuse_to_overwrite(folder: Path, files: Files) -> None:
    """Exit where a file would be lost: one that differs, and that git cannot bring back."""
    differing = [
        path
        for path, file in files.items()
        if (folder / path).is_file() and (folder / path).read_bytes() != file.data
    ]
    if not differing:
        return
    command = ["git", "-C", str(folder), "status", "--porcelain", "--ignored", "--", *differing]
    status = subprocess.run(command, capture_output=True, text=True, check=False)
    if status.returncode or status.stdout.strip():
        shown = ", ".join(differing[:5]) + (", ..." if len(differing) > 5 else "")
        sys.exit(f"{folder} has files that would be lost: {shown}.\nCommit them, or move them.")


def start_repository(folder: Path) -> None:
    """Make a repository and commit all, which `copier update` builds on."""
    for arguments in (["init", "-q", "-b", "main"], ["add", "-A"]):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)
    commit = ["git", "-C", str(folder), "commit", "-q", "-m", "Start from the template"]
    if subprocess.run(commit, check=False).returncode:
        print("The first commit is yours to make: git commit -m 'Start from the template'")


if __name__ == "__main__":
    main()
