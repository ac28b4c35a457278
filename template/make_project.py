"""Make a project out of this template: what `copier copy` runs. Needs Python 3.11 and git.

    python template/make_project.py ../my-study --name my-study --package my_study

The owner's files get the name of the package; README and pyproject.toml get the answers. The
harness comes along as a folder, or as a package that pip takes from the template's repository.
"""

import argparse
import json
import keyword
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parents[1]
FILES = tomllib.loads((ROOT / "template" / "files.toml").read_text())
OLD = "project"  # the package's name here: in dotted names, in paths, and alone in quotes
NAME = rf'(?<![\w./-]){OLD}(?=\.(?:models|data|callbacks)\b)|(?<=src/){OLD}\b|(?<="){OLD}(?=")'


def main() -> None:
    """Write the project that the arguments describe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the project goes")
    parser.add_argument("--name", required=True, help="for pip and the README's title: my-study")
    parser.add_argument("--package", required=True, help="for import: my_study")
    parser.add_argument("--description", default="A study.", help="one line")
    parser.add_argument("--author", default="Its authors")
    names = ",".join(FILES["examples"])
    parser.add_argument("--examples", default=names, help=f"of {names}; an empty text for none")
    parser.add_argument("--library", default="", help="address@version of it, without a folder")
    parser.add_argument("--update", action=argparse.BooleanOptionalAction, help="of a project")
    answers = parser.parse_args()
    check(answers)
    files = copied(answers)
    files |= written(answers, files["pyproject.toml"].decode().partition("# Yours: ")[2])
    for path, data in files.items():
        target = answers.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if data.startswith(b"#!"):
            target.chmod(0o755)
    if not (answers.update or git(answers.folder, "rev-parse", "--git-dir")):
        for words in (["init", "-b", "main"], ["add", "-A"], ["commit", "-m", "From the template"]):
            git(answers.folder, *words)


def git(folder: Path, *words: str) -> str:
    """Return what git answers; nothing if it fails."""
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def check(answers: argparse.Namespace) -> None:
    """Exit where files would be lost, or pip or Python would take the project for another."""
    lock = (ROOT / "requirements.lock").read_text().lower().replace("-", "_")
    taken = {line.partition("==")[0] for line in lock.splitlines()} | {"harness", "tests"}
    if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", answers.name, re.ASCII):
        sys.exit(f"{answers.name!r} is no name for pip: use letters, numbers, hyphens: my-study.")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", answers.package) or keyword.iskeyword(answers.package):
        sys.exit(f"{answers.package!r} is no name for import: use lower case letters: my_study.")
    for word in (answers.name.lower().replace("-", "_"), answers.package):
        if word in taken | sys.stdlib_module_names:
            sys.exit(f"{word} is the name of a package that the project needs: use {word}_study.")
    if not answers.update and [*answers.folder.glob("[!.]*")]:
        sys.exit(f"{answers.folder} is not empty. Choose another folder.")


def copied(answers: argparse.Namespace) -> dict[str, bytes]:
    """Return the files that go over, with the name of the owner's package."""
    of_examples = {path for paths in FILES["examples"].values() for path in paths}
    names = [name for name in answers.examples.split(",") if name]
    for name in {*names} - FILES["examples"].keys():
        sys.exit(f"{name} is no example: {', '.join(FILES['examples'])} are.")
    wanted = {path for name in names for path in FILES["examples"][name]}
    left_out = {*FILES["left_out"]} | (of_examples - wanted)
    left_out |= {"harness", "requirements.txt"} if answers.library else set()
    files = {}
    for path in git(ROOT, "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / path).is_file() and not left_out & {path, *map(str, Path(path).parents)}:
            data = (ROOT / path).read_bytes()
            if not path.startswith("harness/"):
                data = re.sub(NAME, answers.package, data.decode()).encode()
            files[path.replace(f"src/{OLD}/", f"src/{answers.package}/")] = data
    return files


def written(answers: argparse.Namespace, tools: str) -> dict[str, bytes]:
    """Return the files that hold the answers; ``tools`` are the settings of linters and tests."""
    address, _, version = answers.library.rpartition("@")
    values = vars(answers) | {
        "docs": "harness/docs",
        "library": f"harness @ git+{answers.library}#subdirectory=harness",
        "requirements": "requirements.txt",
    }
    if answers.library:
        page = f"/blob/{version}" if address.startswith("http") else ""  # as GitHub and GitLab do
        values["docs"] = f"{address.removesuffix('.git')}{page}/harness/docs"
        values["requirements"] = "pyproject.toml"
    quoted = {key: json.dumps(str(value), ensure_ascii=False) for key, value in values.items()}
    kind = "package" if answers.library else "vendored"
    template = Template((ROOT / "template" / f"{kind}.toml").read_text())
    tools = tools.replace(', "template/tests"', "")
    tools = tools.replace(', "harness/src"', "") if answers.library else tools
    head = template.substitute(quoted, package=answers.package)
    files = {"pyproject.toml": f"{head}# Yours: {tools}"}
    for page in ("README.md", "START.md"):
        files[page] = Template((ROOT / "template" / page).read_text()).substitute(values)
    if not answers.library:
        files[".gitattributes"] = "harness/** linguist-vendored\n"
    return {path: text.encode() for path, text in files.items()}


if __name__ == "__main__":
    main()
