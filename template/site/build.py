"""Build the documentation site from the Markdown of ``harness/docs``, into ``build/site``.

    python -m template.site.build

In: the pages, and the list of pages in ``harness/docs/README.md``, which is also the navigation.
Out: HTML. The program copies the pages into ``build/docs`` and calls zensical there. Links to files
that are not pages become links into the repository of ``REPOSITORY_URL``, or plain text without
it. ``SITE_URL`` is the address of the site.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from template.site.lists import nested_by_four, unread
from template.site.yaml_keys import ROOT

DOCS = ROOT / "harness" / "docs"
STAGE, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
# Pages outside of the folder, and the names that they get on the site.
OUTSIDE = {"README.md": "first_run.md", "harness/README.md": "library.md"}
COPIED = (".md", ".png", ".svg")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
ENTRY = re.compile(r"(?m)^- \[([^\]]+)\]\(([^)]+)\)")


class Page(NamedTuple):
    """A page of the navigation."""

    title: str
    path: str  # on the site


def navigation() -> dict[str, list[Page]]:
    """Return the parts of ``harness/docs/README.md``, and the pages that each lists."""
    names = on_site()
    text = (DOCS / "README.md").read_text()
    return {
        part.partition("\n")[0]: [
            Page(title, names[relative(DOCS / link)]) for title, link in ENTRY.findall(part)
        ]
        for part in text.split("\n## ")[1:]
    }


def on_site() -> dict[str, str]:
    """Return the files of the site, by their path in the repository."""
    paths = [path for path in sorted(DOCS.rglob("*")) if path.suffix in COPIED]
    names = {relative(path): path.relative_to(DOCS).as_posix() for path in paths}
    return names | {"harness/docs/README.md": "index.md"} | OUTSIDE


def relative(path: Path) -> str:
    """Return a path below the repository."""
    return Path(os.path.relpath(path, ROOT)).as_posix()


def staged(source: str, names: dict[str, str], repository: str) -> str:
    """Return the text of a page with the links that it has on the site."""

    def replace(match: re.Match[str]) -> str:
        is_image, text, link = match.groups()
        path, sign, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return match[0]
        target = relative((ROOT / source).parent / path)
        if target in names:
            here = Path(names[source]).parent
            return f"{is_image}[{text}]({os.path.relpath(names[target], here)}{sign}{anchor})"
        if not (ROOT / target).exists():
            raise SystemExit(f"{source}: there is no {path}.")
        return f"[{text}]({repository}/blob/main/{target})" if repository else text

    pieces = re.split(r"(?ms)(^ *```.*?^ *```|`[^`\n]+`)", (ROOT / source).read_text())
    # Code keeps its brackets. A link's text may have code in it, so code is put back first.
    code = pieces[1::2]
    text = "".join(piece if n % 2 == 0 else f"\0{n // 2}\0" for n, piece in enumerate(pieces))
    text = re.sub("\0(\\d+)\0", lambda match: code[int(match[1])], LINK.sub(replace, text))
    return nested_by_four(text)


def unlisted() -> Iterator[str]:
    """Yield the pages that ``harness/docs/README.md`` does not list."""
    listed = {page.path for pages in navigation().values() for page in pages} | {"index.md"}
    for source, name in on_site().items():
        if name.endswith(".md") and name not in listed:
            yield source


def config(repository: str, address: str) -> str:
    """Return the settings of zensical."""
    nav = [{"Home": "index.md"}]
    parts = [
        {title: [{page.title: page.path} for page in pages]}
        for title, pages in navigation().items()
        if pages
    ]
    project = tomllib.loads((ROOT / "harness" / "pyproject.toml").read_text())["project"]
    settings = {
        "site_name": project["name"],
        "site_description": project["description"],
        "docs_dir": "docs",
        "site_dir": "site",
        "nav": nav + parts,
    }
    settings |= {"repo_url": repository} if repository else {}
    settings |= {"site_url": address} if address else {}
    lines = "".join(f"{key} = {inline(value)}\n" for key, value in settings.items())
    return f"[project]\n{lines}\n{(Path(__file__).with_name('theme.toml')).read_text()}"


def inline(value: object) -> str:
    """Return a value in TOML, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {inline(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Copy the pages, build the site, and return the exit status."""
    if missing := [*unlisted()]:
        print(f"harness/docs/README.md does not list {', '.join(missing)}. Add a line for each.")
        return 1
    repository = os.environ.get("REPOSITORY_URL", "").removesuffix("/")
    for folder in (STAGE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    names = on_site()
    for source, name in names.items():
        target = STAGE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".md":
            target.write_text(staged(source, names, repository))
        else:
            shutil.copyfile(ROOT / source, target)
    settings = STAGE.parent / "zensical.toml"
    settings.write_text(config(repository, os.environ.get("SITE_URL", "")))
    program = Path(sys.executable).with_name("zensical")
    command = [program, "build", "--strict", "--clean", "--config-file", settings]
    status = subprocess.run(command, cwd=STAGE.parent, check=False).returncode
    if status:
        return status
    pages = [*SITE.rglob("index.html")]
    for path in pages:
        for line in unread(path.read_text()):
            print(f"{path.relative_to(SITE)}: write an empty line before: {line}")
            status = 1
    print(f"{len(pages)} pages are in {os.path.relpath(SITE, ROOT)}. Open index.html there.")
    return status


if __name__ == "__main__":
    sys.exit(main())
