"""The reference equals its sources, every key has a meaning, and the site has every page.

``test_readme.py`` checks the links and their anchors.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from template.site import build, config_keys, config_page, reference


def test_the_committed_reference_is_what_its_sources_give(tmp_path: Path) -> None:
    reference.main(tmp_path)
    pages = {path.name: path.read_text() for path in tmp_path.iterdir()}
    outdated = [name for name in pages if pages[name] != (reference.FOLDER / name).read_text()]
    assert pages.keys() >= {"config.md", "api.md", "verdicts.md"}
    assert outdated == [], "Run make reference."


def test_a_comment_behind_or_above_a_key_is_its_meaning_and_a_key_without_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_page, "ROOT", tmp_path)
    path = tmp_path / "mine.yaml"
    text = "# Mine\n#   python train.py\nfirst: '#1'  # behind\n# above,\n# twice\nsecond: [1, 2]\n"
    path.write_text(text)
    assert config_page.section({}, config_keys.read(path, "data"), "## Head") == [
        "## Head\n",
        "Mine.\n",
        "```bash\npython train.py\n```\n",
        "The file is `mine.yaml`.\n",
        "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
        "| `data.first` | text | `'#1'` | behind |\n"
        "| `data.second` | list | `[1, 2]` | above, twice |\n",
    ]
    path.write_text(f"{text}third:\n  fourth: null\n")
    with pytest.raises(SystemExit, match=r"mine\.yaml: data\.third\.fourth has no meaning"):
        config_page.section({}, config_keys.read(path, "data"), "## Head")


def test_navigation_has_four_parts_and_every_page() -> None:
    names = build.on_site()
    parts = [title for part in build.navigation(names) for title in part]
    assert parts == ["Home", "Tutorial", "How-to", "Reference", "Explanation"]
    with pytest.raises(SystemExit, match=r"does not list new\.md"):
        build.navigation(names | {"harness/docs/new.md": "new.md"})


def test_pages_get_the_links_and_lists_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "train.py").touch()
    page = tmp_path / "docs" / "a.md"
    names = {"docs/a.md": "a.md", "README.md": "first_run.md", "docs/b.md": "in/b.md"}
    page.write_text(
        "- [1](../README.md#start)\n  - [`2`](b.md) [3](../train.py) `[4](b.md)` [5](#a)"
    )
    assert build.staged("docs/a.md", names, "https://a.org") == (
        "- [1](first_run.md#start)\n    - [`2`](in/b.md) [3](https://a.org/blob/main/train.py) "
        "`[4](b.md)` [5](#a)"
    )
    assert " 3 `[4]" in build.staged("docs/a.md", names, "")
    page.write_text("[gone](gone.md)")
    with pytest.raises(SystemExit, match=r"docs/a\.md: there is no gone\.md"):
        build.staged("docs/a.md", names, "")


@pytest.mark.skipif(not find_spec("zensical"), reason="make docs installs zensical")
def test_the_site_builds_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "STAGE", tmp_path / "docs")
    monkeypatch.setattr(build, "SITE", tmp_path / "site")
    assert build.main() == 0, capfd.readouterr().out
    assert (tmp_path / "site" / "reference" / "config" / "index.html").is_file()
