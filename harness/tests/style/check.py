"""Find phrases that the style guide replaces, in docstrings, comments, messages, YAML and Markdown.

    python harness/tests/style/check.py              all tracked files
    python harness/tests/style/check.py FILE FOLDER  some of them

``phrases.csv`` holds the phrases, as regular expressions, and what to write instead. Also found:
a sentence that begins with a relative clause in place of its subject, and a sentence in Markdown
that is longer than ``MAX_WORDS``. A line with a comment ``style: ignore`` is left out. The exit
status is 1 if anything was found.
"""

import csv
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
IGNORE = "style: ignore"
MAX_WORDS = 30
LEFT_OUT = ("phrases.csv", "LICENSE", "requirements.lock")
READ = (".py", ".md", ".yaml", ".yml", ".toml")
BEGINNING = re.compile(r"(?:^|[.:;!?] )(?:What(?:ever)?|Who(?:ever)|Of|Where) [a-z`]")
KINDS = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", None))
QUESTION = re.compile(r"^[^.]*\?")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file that a person reads, each with its first line's number."""
    content = path.read_text()
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(content).readline):
            if token.type in KINDS:
                yield token.start[0], token.string
    elif path.suffix in (".yaml", ".yml", ".toml"):
        for number, line in enumerate(content.splitlines(), 1):
            if "#" in line:
                yield number, line[line.index("#") :]
    elif path.suffix == ".md":
        is_code = False
        for number, line in enumerate(content.splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if not is_code:
                yield number, line


def found(path: Path, phrases: Iterable[tuple[re.Pattern[str], str]]) -> Iterator[str]:
    """Yield a line for each phrase of a file that should be written otherwise."""
    ignored = {n for n, line in enumerate(path.read_text().splitlines(), 1) if IGNORE in line}
    for start, text in texts(path):
        for number, line in enumerate(text.splitlines(), start):
            if number in ignored:
                continue
            plain = re.sub(r"`[^`]*`", "``", line.strip("# \"'rfRF"))  # without code
            for phrase, write in phrases:
                if match := phrase.search(plain):
                    yield f"{path}:{number}: {match.group()!r}: {write}"
            if (match := BEGINNING.search(plain)) and not QUESTION.search(plain[match.end() :]):
                yield f"{path}:{number}: {match.group()!r} begins a sentence: name the subject"


def long_sentences(path: Path) -> Iterator[str]:
    """Yield a line for each sentence of a Markdown file that is longer than ``MAX_WORDS``."""
    content = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text())
    content = re.sub(r"\]\([^)]*\)|`[^`]*`|https?:\S+", "x", content)
    for cell in re.split(r"\n\s*\n|\||^\s*(?:[-*]|\d+\.) |^#.*$", content, flags=re.MULTILINE):
        for sentence in re.split(r"(?<=[.:?!])[\s*)\"]+", cell):
            if (length := len(parts := sentence.split())) > MAX_WORDS:
                yield f"{path}: {length} words: {' '.join(parts[:8])} …"  # style: ignore


def main(arguments: list[str]) -> int:
    """Print what was found, and return the exit status."""
    with (Path(__file__).with_name("phrases.csv")).open(newline="") as file:
        phrases = [(re.compile(row["phrase"], re.I), row["write"]) for row in csv.DictReader(file)]
    listed = subprocess.run(
        ["git", "ls-files", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    num_found = 0
    for path in paths:
        if path.is_file() and path.suffix in READ and path.name not in LEFT_OUT:
            long = long_sentences(path) if path.suffix == ".md" else ()
            for line in (*found(path, phrases), *long):
                print(line.replace(f"{ROOT}/", ""))
                num_found += 1
    return min(num_found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
