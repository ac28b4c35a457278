"""Make a project out of this template: what `copier copy` runs.

    python template/make_project.py ../my-study --name my-study --package my_study
    python template/make_project.py --help

Renames the package, fills in the answers, leaves out what is the template's own and, if asked, the
examples. It writes the files of the template and touches no others, so that it can also update a
project with files of its own. Needs Python 3.10 and git; nothing has to be installed.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import remove_examples  # noqa: E402
import rename_project  # noqa: E402
import work_tree  # noqa: E402
from work_tree import File, Files  # noqa: E402

# What a project does not get. Elsewhere, lines and paragraphs that mention one of these go as well.
OWN = (
    *(
        "template",
        "tests_harness/template",
        "copier.yml",
        "benchmarks",
        "tests_harness/test_benchmarks.py",
    ),
    *("docs/performance.md", "CHANGELOG.md"),
    *("scripts/rename_project.py", "scripts/remove_examples.py", "scripts/work_tree.py"),
)
OWN_WORDS = (
    *("template/", "copier", "make_project", "benchmarks", r"performance\.md", "CHANGELOG"),
    *("rename_project", "remove_examples", "work_tree"),
)
LICENSES = sorted(path.stem for path in (ROOT / "template" / "licenses").glob("*.txt"))


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
    parser.add_argument("--examples", action=flag, default=True, help="keep them")
    parser.add_argument("--git", action=flag, help="start a repository with a first commit")
    answers = parser.parse_args()
    template = work_tree.read(ROOT)
    old = work_tree.package(template)
    if answers.package != old:
        rename_project.check_name(answers.package, template, old)
    check_name(answers.name, template)
    files = make(template, answers)
    refuse_to_overwrite(answers.folder, files)
    work_tree.write(answers.folder, {}, files)
    if answers.git and not (answers.folder / ".git").exists():
        start_repository(answers.folder)


def check_name(name: str, template: Files) -> None:
    """Exit where pip would refuse the name, or take the project for a dependency of its own."""
    if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", name, re.ASCII):
        sys.exit(f"{name!r} is not a name for pip: use letters, numbers and hyphens: my-study.")
    names = {_normalized(locked) for locked in rename_project.locked(template)}
    if _normalized(name) in names | rename_project.INSTALLERS:
        sys.exit(f"{name} is a dependency of the project. Use another name, such as {name}-study.")


def _normalized(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def make(template: Files, answers: argparse.Namespace) -> Files:
    """Return the files of the project."""
    files = template
    if not answers.examples:
        files = remove_examples.without_examples(files)
    mentioned = remove_examples.words(OWN_WORDS)
    files = {
        path: remove_examples.without(path, file, mentioned)
        for path, file in files.items()
        if not any(path == own or path.startswith(f"{own}/") for own in OWN)
    }
    files = without_unused_pictures(files)
    files = remove_examples.without_locked(files, remove_examples.COPIER_NEEDS)
    old = work_tree.package(files)
    if answers.package != old:
        files = rename_project.rename(files, old, answers.package)
    return with_answers(files, answers)


def without_unused_pictures(files: Files) -> Files:
    """Leave out pictures that no page shows any more."""
    pages = b"".join(file.data for path, file in files.items() if path.endswith(".md"))
    return {
        path: file
        for path, file in files.items()
        if not (path.startswith("docs/") and path.endswith(".png"))
        or Path(path).name.encode() in pages
    }


def with_answers(files: Files, answers: argparse.Namespace) -> Files:
    """Fill in name, description, author and licence."""
    author = answers.author or f"The {answers.name} authors"
    pyproject = files["pyproject.toml"]
    text = pyproject.data.decode()
    text = _set(text, "name", _quoted(answers.name))
    text = _set(text, "description", _quoted(answers.description or answers.name))
    licence = [f"license = {_quoted(answers.license)}"] if answers.license != "none" else []
    people = f"authors = [{{ name = {_quoted(author)} }}]"
    text = re.sub(r'(?m)^license = ".*"$', lambda _: "\n".join([*licence, people]), text, count=1)
    files = files | {"pyproject.toml": pyproject._replace(data=text.encode())}

    readme = files["README.md"]
    title, _, rest = readme.data.decode().split("\n\n", 2)  # the title, what this is, the rest
    assert title.startswith("# ")
    opening = [f"# {answers.name}", *filter(None, [answers.description])]
    files = files | {"README.md": readme._replace(data="\n\n".join([*opening, rest]).encode())}

    if answers.license == "none":
        return {path: file for path, file in files.items() if path != "LICENSE"}
    terms = (ROOT / "template" / "licenses" / f"{answers.license}.txt").read_text()
    return files | {"LICENSE": File(terms.replace("<author>", author).encode())}


def _set(text: str, key: str, value: str) -> str:
    return re.sub(rf'(?m)^{key} = ".*"$', lambda _: f"{key} = {value}", text, count=1)


def _quoted(text: str) -> str:
    """A string as TOML writes it."""
    return json.dumps(text, ensure_ascii=False)


def refuse_to_overwrite(folder: Path, files: Files) -> None:
    """Exit where a file would be lost: one that differs, and that git cannot bring back."""
    differing = [
        path
        for path, file in files.items()
        if (folder / path).is_file() and (folder / path).read_bytes() != file.data
    ]
    if not differing:
        return
    status = subprocess.run(
        ["git", "-C", str(folder), "status", "--porcelain", "--ignored", "--", *differing],
        capture_output=True,
        text=True,
        check=False,
    )
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
