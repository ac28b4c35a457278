"""Build the documentation site from the Markdown of ``harness/docs``, into ``build/site``.

    python -m template.site.build

The list of pages in ``harness/docs/README.md`` is also the navigation. The program copies the
pages into ``build/docs`` and calls zensical there. Links to files that are not pages become links
into the repository of ``REPOSITORY_URL``, or plain text without it. ``SITE_URL`` is the address.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from template.site.markdown import ROOT

DOCS = ROOT / "harness" / "docs"
STAGE, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
# Pages that have another name on the site.
RENAMED = {"README.md": "first_run.md", "harness/README.md": "library.md"}
RENAMED |= {"harness/docs/README.md": "index.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s:#]+)(#[^()\s]*)?\)")
ENTRY = re.compile(r"(?m)^- \[([^\]]+)\]\(([^)]+)\)")


def on_site() -> dict[str, str]:
    """Return the files of the site, by their path in the repository."""
    paths = (path for path in sorted(DOCS.rglob("*")) if path.suffix in (".md", ".png", ".svg"))
    return {str(path.relative_to(ROOT)): str(path.relative_to(DOCS)) for path in paths} | RENAMED


def navigation(names: dict[str, str]) -> list[dict[str, object]]:
    """Return the parts of ``harness/docs/README.md``, and the pages that each lists."""
    parts: list[dict[str, object]] = [{"Home": "index.md"}]
    missing = {name for name in names.values() if name.endswith(".md")} - {"index.md"}
    for part in (DOCS / "README.md").read_text().split("\n## ")[1:]:
        pages = {
            title: names[os.path.normpath(f"harness/docs/{link}")]
            for title, link in ENTRY.findall(part)
        }
        parts.append({part.partition("\n")[0]: [{title: page} for title, page in pages.items()]})
        missing -= {*pages.values()}
    if missing:
        listed = ", ".join(sorted(missing))
        raise SystemExit(f"harness/docs/README.md does not list {listed}. Add a line for each.")
    return parts


def staged(source: str, names: dict[str, str], repository: str) -> str:
    """Return the text of a page with the links and the lists that it needs on the site."""

    def replace(match: re.Match[str]) -> str:
        is_image, text, path, anchor = match.groups(default="")
        target = os.path.normpath(Path(source).parent / path)
        if target in names:
            link = os.path.relpath(names[target], Path(names[source]).parent)
            return f"{is_image}[{text}]({link}{anchor})"
        if not (ROOT / target).exists():
            raise SystemExit(f"{source}: there is no {path}.")
        return f"[{text}]({repository}/blob/main/{target})" if repository else text

    # Code keeps its brackets. A link's text may have code in it, so code is put back at the end.
    pieces = re.split(r"(?ms)(^ *```.*?^ *```|`[^`\n]+`)", (ROOT / source).read_text())
    text = "".join(piece if n % 2 == 0 else f"\0{n}\0" for n, piece in enumerate(pieces))
    # The site's parser nests lists by four columns, GitHub by the width of the marker.
    text = re.sub(r"(?m)^ {2,3}(?=\S)", "    ", LINK.sub(replace, text))
    return re.sub("\0(\\d+)\0", lambda match: pieces[int(match[1])], text)


def settings(names: dict[str, str], repository: str) -> str:
    """Return the settings of zensical: those of ``zensical.toml``, navigation and addresses."""
    values = {
        "repo_url": repository,
        "site_url": os.environ.get("SITE_URL"),
        "nav": navigation(names),
    }
    lines = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n".replace('": ', '" = ')
        for key, value in values.items()
        if value
    ]
    text = Path(__file__).with_name("zensical.toml").read_text()
    return text.replace("[project]\n", "".join(["[project]\n", *lines]), 1)


def main() -> int:
    """Copy the pages, build the site, and return the exit status."""
    repository = os.environ.get("REPOSITORY_URL", "").removesuffix("/")
    names = on_site()
    for folder in (STAGE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    for source, name in names.items():
        (STAGE / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            (STAGE / name).write_text(staged(source, names, repository))
        else:
            shutil.copyfile(ROOT / source, STAGE / name)
    file = STAGE.parent / "zensical.toml"
    file.write_text(settings(names, repository))
    program = Path(sys.executable).with_name("zensical")
    command = [program, "build", "--strict", "--clean", "--config-file", file]
    status = subprocess.run(command, cwd=STAGE.parent, check=False).returncode
    for path in SITE.rglob("index.html"):
        for text in re.findall(r"(?s)<p>(.*?)</p>", path.read_text()):
            for line in re.findall(r"(?m)^(?:[-*] |\d+\. |\|).*", text):
                print(f"{path.relative_to(SITE)}: write an empty line before: {line}")
                status = 1
    if not status:
        print(f"The pages are in {os.path.relpath(SITE, ROOT)}. Open index.html there.")
    return status


if __name__ == "__main__":
    sys.exit(main())
