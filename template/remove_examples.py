"""Take the examples (digits, contrastive) out; what is left trains and passes its tests.

    python scripts/remove_examples.py            what goes is printed
    python scripts/remove_examples.py --force    also over changes that are not committed

Files that are named after an example go; of other files, the lines, table rows and paragraphs that
mention one. What trains by default is then data=synthetic. The clone is no longer a template: what
copier needs goes as well, and so does this program. Needs git; nothing has to be installed.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import work_tree
from work_tree import File, Files

EXAMPLES = ("digits", "contrastive")
# What makes projects with or without examples, and this program, have no purpose afterwards.
MAKES_PROJECTS = (
    "template/",
    "tests_harness/template/",
    "copier.yml",
    "scripts/remove_examples.py",
)
MAKES_PROJECTS_WORDS = ("template/", "copier", "make_project", "remove_examples")
# Distributions in requirements.lock that nothing else needs; a test looks at them.
EXAMPLES_NEED = ("scikit-learn", "cloudpickle", "joblib", "narwhals", "scipy", "threadpoolctl")
COPIER_NEEDS = (
    *("copier", "annotated-types", "dunamai", "funcy", "jinja2-ansible-filters", "platformdirs"),
    *("plumbum", "prompt_toolkit", "pydantic", "pydantic_core", "questionary"),
    *("typing-inspection", "wcwidth"),
)
DEFAULT_DATA = (b"data: digits", b"data: synthetic")  # in conf/train.yaml


def main() -> None:
    """Remove the examples from the repository that this file is in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--force", action="store_true", help="also with uncommitted changes")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    work_tree.refuse_changes(root, arguments.force)
    before = work_tree.read(root)
    makes_projects = words(MAKES_PROJECTS_WORDS)
    after = {
        path: without(path, file, makes_projects)
        for path, file in without_examples(before).items()
        if not path.startswith(MAKES_PROJECTS)
    }
    after = without_locked(after, COPIER_NEEDS)
    for path in work_tree.write(root, before, after):
        print(f"{'changed' if path in after else 'removed'} {path}")
    if left := mentions(after, words(EXAMPLES)):
        sys.exit("These lines still need an example. Change them by hand:\n" + "\n".join(left))
    print("Next: make test")


def words(names: tuple[str, ...]) -> re.Pattern[str]:
    """Find names also as parts of longer ones, such as ``digits_cnn``, but not of other words."""
    return re.compile(rf"(?<![a-z])({'|'.join(names)})(?![a-z])", re.IGNORECASE)


def without_examples(files: Files) -> Files:
    """Return the files of the skeleton."""
    mentioned, kept = words(EXAMPLES), {}
    for path, file in files.items():
        if not mentioned.search(path):
            if path == "conf/train.yaml":
                file = file._replace(data=file.data.replace(*DEFAULT_DATA))
            kept[path] = without(path, file, mentioned)
    return without_locked(kept, EXAMPLES_NEED)


def without_locked(files: Files, names: tuple[str, ...]) -> Files:
    """Take distributions out of requirements.lock."""
    lock = files["requirements.lock"]
    lines = lock.data.decode().splitlines(keepends=True)
    text = "".join(line for line in lines if line.partition("==")[0] not in names)
    return files | {"requirements.lock": lock._replace(data=text.encode())}


def without(path: str, file: File, mentioned: re.Pattern[str]) -> File:
    """Take out what mentions a name: lines, rules of make, paragraphs and rows of Markdown."""
    try:
        text = file.data.decode()
    except UnicodeDecodeError:
        return file
    if not mentioned.search(text):
        return file
    if path.endswith(".md"):
        text = markdown_without(text, mentioned)
    elif path == "Makefile":
        text = _makefile_without(text, mentioned)
    else:
        removable = _comments(text) if path.endswith(".py") else None
        lines = text.splitlines(keepends=True)
        text = "".join(
            line
            for number, line in enumerate(lines, 1)
            if not mentioned.search(line) or (removable is not None and number not in removable)
        )
    return file._replace(data=text.encode())


def _makefile_without(text: str, mentioned: re.Pattern[str]) -> str:
    """Take out comments that mention a name, and rules whole."""
    parts = [
        "\n".join(line for line in part.splitlines() if not _is_comment(line, mentioned))
        for part in text.split("\n\n")
    ]
    return "\n\n".join(part for part in parts if part and not mentioned.search(part)) + "\n"


def _is_comment(line: str, mentioned: re.Pattern[str]) -> bool:
    return line.startswith("#") and mentioned.search(line) is not None


def _comments(code: str) -> set[int]:
    """Numbers of the lines that hold nothing but a comment or a part of a docstring."""
    numbers = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            # Not the lines with the quotes.
            numbers |= set(range(node.lineno + 1, node.end_lineno or node.lineno))
    return numbers


def mentions(files: Files, mentioned: re.Pattern[str]) -> list[str]:
    """List what is left, as ``path:line: text``."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path, file in files.items()
        for number, line in enumerate(file.data.decode(errors="replace").splitlines(), 1)
        if mentioned.search(line)
    ]


def markdown_without(text: str, mentioned: re.Pattern[str]) -> str:
    """Take the blocks that mention a name out of a page, and headings that nothing follows.

    A block is a paragraph, an item of a list, a row of a table, a line of a code block. What a
    paragraph announces with a colon goes with it; so does a section whose heading has the name.
    """
    kept: list[tuple[str, str]] = []
    announced, section = False, 7  # 7: no section is being left out
    for gap, block in _blocks(text):
        if level := _level(block):
            section = 7 if level <= section else section
            if section == 7 and mentioned.search(block):
                section = level
            announced = False
        if section < 7:
            continue
        shorter = "" if announced else _shortened(block, mentioned)
        if not shorter and kept and kept[-1][1].endswith(":") and block.startswith(MEMBERS):
            kept.pop()  # it announced what is gone
        announced = not shorter and block.endswith(":")
        if shorter:
            kept.append((gap, shorter))
    return "".join(gap + block for gap, block in _without_empty_sections(kept)).lstrip("\n") + "\n"


MEMBERS = ("|", "```", "- ", "#")  # what a line begins with that begins a block


def _blocks(text: str) -> list[tuple[str, str]]:
    """Split a page into blocks, each with the empty lines before it."""
    blocks: list[tuple[str, str]] = []
    gap, lines, in_code = "\n", list[str](), False

    def end() -> None:
        nonlocal gap
        if lines:
            blocks.append((gap, "\n".join(lines)))
            lines.clear()
            gap = "\n"

    for line in text.rstrip("\n").splitlines():
        fence = line.startswith("```")
        if in_code:
            lines.append(line)
            if fence:
                end()
        elif not line.strip():
            end()
            gap = "\n\n"
        else:
            # A table and a list stay whole; their rows and items go one by one.
            goes_on = lines and lines[0][0] == line[0]
            if fence or (line.startswith(MEMBERS) and not goes_on):
                end()
            lines.append(line)
            if _level(line):
                end()
        in_code ^= fence
    end()
    return blocks


def _level(block: str) -> int:
    heading = re.match(r"(#{1,6}) ", block)
    return len(heading[1]) if heading else 0


def _shortened(block: str, mentioned: re.Pattern[str]) -> str:
    """What is left of a block; nothing where all of it goes."""
    if not mentioned.search(block):
        return block
    lines = block.splitlines()
    if block.startswith("```"):
        code = [line for line in lines[1:-1] if not mentioned.search(line)]
        return "\n".join([lines[0], *code, lines[-1]]) if any(map(str.strip, code)) else ""
    if block.startswith("|"):
        rows = [row for row in lines[2:] if not mentioned.search(row)]
        return "\n".join([*lines[:2], *rows]) if rows else ""
    if block.startswith("- "):
        items = re.split(r"\n(?=- )", block)
        return "\n".join(item for item in items if not mentioned.search(item))
    return ""


def _without_empty_sections(blocks: list[tuple[str, str]]) -> list[tuple[str, str]]:
    kept: list[tuple[str, str]] = []
    for gap, block in reversed(blocks):
        level = _level(block)
        if not level or (kept and not 0 < _level(kept[-1][1]) <= level):
            kept.append((gap, block))
    return kept[::-1]


if __name__ == "__main__":
    main()
