"""Make a project from this template; `copier copy` runs this program. It needs Python 3.11 and git.

    python template/make_project.py ../my-study --name my-study --package my_study

The name of the package is written into the user's files, and the answers into README and
pyproject.toml. The library is copied as a folder, or pip installs it from the template's
repository.
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
NAME = re.compile(  # the name of the package here: in dotted names, in paths, alone in quotes
    r'(?<![\w./-])project(?=\.(?:models|data|callbacks)\b)|(?<=src/)project\b|(?<=")project(?=")'
)


def main() -> None:
    """Write the project that the arguments describe."""
    parser = argparse.ArgumentParser(
        "python template/make_project.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the project goes")
    parser.add_argument("--name", required=True, help="for pip and the README's title: my-study")
    parser.add_argument("--package", required=True, help="for import: my_study")
    parser.add_argument("--description", default="A study.", help="one line")
    parser.add_argument("--author", default="Its authors")  # style: ignore
    parser.add_argument("--examples", default=",".join(FILES["examples"]), help="names, or none")
    parser.add_argument("--library", default="", help="URL@version for pip; empty copies a folder")
    parser.add_argument("--update", action=argparse.BooleanOptionalAction, help="update a project")
    answers = parser.parse_args()
    check(answers)
    for path, data in (copied(answers) | written(answers)).items():
        target = answers.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if data.startswith(b"#!") else 0o644)
    if not (answers.update or git(answers.folder, "rev-parse", "--git-dir")):
        for step in (["init", "-b", "main"], ["add", "-A"], ["commit", "-m", "From the template"]):
            git(answers.folder, *step)
        print(f"cd {answers.folder} && make train   # START.md says what to do on the first day")


def git(folder: Path, *arguments: str) -> str:
    """Return the output of git; "" if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def check(answers: argparse.Namespace) -> None:
    """Exit with a message if a name is invalid or in use, or the folder is not empty."""
    lock = (ROOT / "requirements.lock").read_text().lower().replace("-", "_")
    taken = {*re.findall(r"(?m)^(\w+)==", lock), "harness", "tests"} | sys.stdlib_module_names
    names = answers.name, answers.package
    if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", names[0], re.ASCII):
        sys.exit(
            f"--name={names[0]} is no valid name for pip. Use letters, digits and hyphens: "
            "--name=my-study"
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", names[1]) or keyword.iskeyword(names[1]):
        sys.exit(
            f"--package={names[1]} is no valid name for import. Use lower case letters, digits and "
            "underscores: --package=my_study"
        )
    for name in taken.intersection(name.lower().replace("-", "_") for name in names):
        sys.exit(f"{name} is the name of a package that the project needs. Use {name}_study.")
    if not answers.update and [*answers.folder.glob("[!.]*")]:
        sys.exit(f"{answers.folder} is not empty. Choose another folder.")


def copied(answers: argparse.Namespace) -> dict[str, bytes]:
    """Return the files that the project gets, with the name of its package."""
    examples, wanted = FILES["examples"], {*answers.examples.split(",")} - {"", "none"}
    for name in wanted - examples.keys():
        sys.exit(f"--examples: {name} is no example. Choose from {', '.join(examples)}, or none.")
    left_out = {*FILES["left_out"], *(["harness", "requirements.txt"] if answers.library else [])}
    left_out |= {path for name in examples.keys() - wanted for path in examples[name]}
    # Two examples may need the same file.
    left_out -= {path for name in wanted for path in examples[name]}
    files = {}
    for path in git(ROOT, "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / path).is_file() and not left_out & {path, *map(str, Path(path).parents)}:
            data = (ROOT / path).read_bytes()
            if not path.startswith("harness/"):
                data = NAME.sub(answers.package, data.decode()).encode()
            files[path.replace("src/project/", f"src/{answers.package}/")] = data
    return files


def written(answers: argparse.Namespace) -> dict[str, bytes]:
    """Return the files into which this program writes the user's answers."""
    address, _, version = answers.library.rpartition("@")
    page = f"/blob/{version}" if address.startswith("http") else ""  # a URL of GitHub or GitLab
    values = vars(answers) | {
        "docs": f"{address.removesuffix('.git')}{page}/harness/docs".lstrip("/"),
        "library": f"lightning-harness @ git+{answers.library}#subdirectory=harness",
        "requirements": "pyproject.toml" if address else "requirements.txt",
    }
    quoted = {key: json.dumps(str(value), ensure_ascii=False) for key, value in values.items()}
    kind = "package" if address else "vendored"
    head = (ROOT / "template" / f"{kind}.toml").read_text()
    tools = (ROOT / "pyproject.toml").read_text().partition("# Yours: ")[2]  # linters and tests
    for path in ["template/tests", *(["harness/src"] if address else [])]:
        tools = tools.replace(f', "{path}"', "")
    head = Template(head).substitute(quoted, package=answers.package)
    files = {"pyproject.toml": f"{head}# Yours: {NAME.sub(answers.package, tools)}"}
    for name in ("README.md", "START.md"):
        files[name] = Template((ROOT / "template" / name).read_text()).substitute(values)
    files |= {} if address else {".gitattributes": "harness/** linguist-vendored\n"}
    return {path: text.encode() for path, text in files.items()}


if __name__ == "__main__":
    main()
