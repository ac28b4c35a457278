"""The reference equals its sources, every key has a meaning, and the site has every page."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import harness
from template.site import api_page, build, config_page, reference, screenshots, yaml_keys
from template.site.key_types import of_rule, type_of
from template.site.lists import nested_by_four, unread
from template.site.yaml_keys import Key


def keys_of(folder: Path, text: str) -> tuple[list[yaml_keys.ConfigFile], yaml_keys.ConfigFile]:
    """Return all config files with one more in ``conf/data``, and that one."""
    (folder / "mine.yaml").write_text(text)
    mine = yaml_keys.read(folder / "mine.yaml", "data")
    return [*yaml_keys.read_all(), mine], mine


def test_committed_reference_is_what_its_sources_give() -> None:
    """Else: make reference. On another Python than 3.11 the page of commands is left out."""
    assert reference.outdated() == []


def test_a_page_that_was_edited_is_out_of_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    monkeypatch.setattr(reference, "PAGES", {"a.md": lambda: "A page.", "b.md": lambda: "Other."})
    assert reference.outdated() == ["a.md", "b.md"]
    (tmp_path / "a.md").write_text(reference.NOTE + "A page.\n")
    (tmp_path / "b.md").write_text(reference.NOTE + "An edited page.\n")
    assert reference.outdated() == ["b.md"]


def test_a_key_without_a_meaning_is_refused_with_its_place(tmp_path: Path) -> None:
    files, mine = keys_of(tmp_path, "# Mine.\nheight: 3  # of the images, in pixels\nwidth: 4\n")
    height, width = mine.keys
    assert config_page.row(files, mine, height)[-1] == "of the images, in pixels"
    with pytest.raises(SystemExit, match=r"mine\.yaml: data\.width has no meaning"):
        config_page.row(files, mine, width)


def test_a_comment_above_a_key_is_its_meaning_and_the_first_comment_is_the_file_s(
    tmp_path: Path,
) -> None:
    text = (
        "# About the file.\n#   python train.py data=mine\nfirst: '#1'  # behind\n"
        "# above,\n# in two lines\nsecond: [1, 2]\nthird:\n  # inside\n  fourth: null\n"
    )
    _, mine = keys_of(tmp_path, text)
    assert mine.text == "About the file."
    assert mine.examples == ["python train.py data=mine"]
    found = {key.path: (key.default, key.comment) for key in mine.set_keys()}
    assert found == {
        "data.first": ("'#1'", "behind"),
        "data.second": ("[1, 2]", "above, in two lines"),
        "data.third.fourth": ("null", "inside"),
    }


def test_types_come_from_the_rules_then_the_argument_then_the_default() -> None:
    assert of_rule("1..") == "integer from 1"
    assert of_rule("0.0..1.0") == "number from 0.0 to 1.0"
    assert type_of(Key("data.num_workers", "0", 0, "")) == "integer from 0, null or `auto`"
    trainer = Key("trainer.max_time", "null", None, "", "pytorch_lightning.Trainer")
    assert type_of(trainer) == "text, duration, mapping or null"
    assert type_of(Key("mine", "0.5", 0.5, "")) == "number"
    assert type_of(Key("mine", "null", None, "")) == ""


def test_every_public_name_is_on_the_page_of_python() -> None:
    headings = re.findall(r"(?m)^### `harness\.(\w+)`$", api_page.write())
    assert sorted(headings) == sorted(harness.__all__)


def test_navigation_has_four_parts_and_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build.navigation()
    assert [*parts] == ["Tutorial", "How-to", "Reference", "Explanation"]
    assert [*build.unlisted()] == []
    names = build.on_site() | {"harness/docs/new.md": "new.md"}
    monkeypatch.setattr(build, "on_site", lambda: names)
    assert [*build.unlisted()] == ["harness/docs/new.md"]


def test_links_lead_to_pages_of_the_site_or_into_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "train.py").touch()
    page = tmp_path / "docs" / "a.md"
    names = {"docs/a.md": "a.md", "README.md": "first_run.md", "docs/b.md": "in/b.md"}
    page.write_text(
        "[one](../README.md#start) [`two`](b.md) [three](../train.py) `[four](b.md)` [five](#here)"
    )
    there = "[one](first_run.md#start) [`two`](in/b.md) "
    assert build.staged("docs/a.md", names, "https://example.org") == (
        f"{there}[three](https://example.org/blob/main/train.py) `[four](b.md)` [five](#here)"
    )
    assert " three `[four]" in build.staged("docs/a.md", names, "")
    page.write_text("[gone](gone.md)")
    with pytest.raises(SystemExit, match=r"docs/a\.md: there is no gone\.md"):
        build.staged("docs/a.md", names, "")


def test_nested_lists_are_indented_by_four_and_a_list_in_a_paragraph_is_found() -> None:
    text = "- one\n  - two\n\n```\n  code\n```\n\n1. three\n   - four\n"
    assert nested_by_four(text) == (
        "- one\n    - two\n\n```\n  code\n```\n\n1. three\n    - four\n"
    )
    assert unread("<p>Text\n- one\n| a | b |</p><p><b>1. Title</b></p>") == ["- one", "| a | b |"]


def test_without_a_browser_no_picture_is_taken_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screenshots.shutil, "which", lambda name: None)
    assert screenshots.main() == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.skipif(not find_spec("zensical"), reason="make docs installs zensical")
def test_the_site_builds_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "STAGE", tmp_path / "docs")
    monkeypatch.setattr(build, "SITE", tmp_path / "site")
    assert build.main() == 0, capfd.readouterr().out
    assert (tmp_path / "site" / "reference" / "config" / "index.html").is_file()
