"""template/remove_examples.py leaves a skeleton; test_copier.py runs its tests."""

import re

import pytest
from remove_examples import (
    EXAMPLES,
    MAKES_PROJECTS_WORDS,
    markdown_without,
    mentions,
    without_examples,
    words,
)

from tests_harness.conftest import ROOT
from tests_harness.template.conftest import commit, run, succeed, tree


def test_nothing_but_the_examples_needs_an_example() -> None:
    """A test of the harness trains on data=synthetic; see CONTRIBUTING.md."""
    whole = tree(ROOT)
    files = without_examples(whole)
    removed = {path for path in whole if path not in files}
    assert len(removed) >= 8
    ours = {
        path: file
        for path, file in files.items()
        if not path.startswith(
            ("template/", "tests_harness/template/", "scripts/remove_examples.py", "copier.yml")
        )
    }
    assert mentions(ours, words(EXAMPLES)) == []


def test_removing_them_in_a_clone_says_what_goes(clone) -> None:
    folder = clone()
    (folder / "mine.py").write_text("import digits\n")
    dirty = run(folder, "python", "scripts/remove_examples.py")
    assert "?? mine.py" in dirty.stderr
    assert (folder / "conf" / "data" / "digits.yaml").exists()
    commit(folder, "Mine")
    result = run(folder, "python", "scripts/remove_examples.py")
    assert "removed conf/data/digits.yaml\n" in result.stdout
    assert "changed conf/train.yaml\n" in result.stdout
    left = [line for line in result.stderr.splitlines() if ":1: " in line or ".py:" in line]
    assert left == ["mine.py:1: import digits"]
    assert (folder / "mine.py").exists()
    assert "- data: synthetic" in (folder / "conf" / "train.yaml").read_text()
    assert not [path for path in tree(folder) if re.search("digits|contrastive", path)]
    files = tree(folder)
    del files["mine.py"]
    assert mentions(files, words((*EXAMPLES, *MAKES_PROJECTS_WORDS))) == []
    succeed(folder, "ruff", "check", "--exclude", "mine.py")


PAGES = {
    "a paragraph": ("# A\n\nOn digits.\n\nElse.\n", "# A\n\nElse.\n"),
    "the section of a heading": (
        "# A\n\nx\n\n## digits\n\ny\n\n### z\n\nz\n\n## B\n\nb\n",
        "# A\n\nx\n\n## B\n\nb\n",
    ),
    "a heading without text": ("# A\n\nx\n\n## B\n\nOn digits.\n", "# A\n\nx\n"),
    "a row": ("| a |\n|---|\n| digits |\n| b |\n", "| a |\n|---|\n| b |\n"),
    "the last row": ("x\n\n| a |\n|---|\n| digits |\n", "x\n"),
    "a line of code": ("```\na digits\n\nb\n```\n", "```\n\nb\n```\n"),
    "the last line of code": ("Type:\n```\na digits\n```\n\nb\n", "b\n"),
    "what it announces": ("On digits:\n\n| a |\n|---|\n| b |\n\nc\n", "c\n"),
    "an item of two lines": ("Two:\n- a\n  digits\n- b\n", "Two:\n- b\n"),
    "a comment that looks like a heading": ("```\n# digits\nx\n```\n", "```\nx\n```\n"),
    "no part of a word": ("isdigits, digitsum\n", "isdigits, digitsum\n"),
}


@pytest.mark.parametrize("what", PAGES)
def test_markdown_loses_what_mentions_an_example(what: str) -> None:
    before, after = PAGES[what]
    assert markdown_without(before, words(EXAMPLES)) == after
