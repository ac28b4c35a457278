"""Give the package another name, everywhere it means the package and nowhere else.

    python scripts/rename_project.py my_study            folder, imports, targets, pyproject, docs
    python scripts/rename_project.py my_study --force    also over changes that are not committed

It reads tokens: imports and what follows from them, dotted names in strings and YAML values,
`src/<name>/` paths, names in pyproject.toml. The word in prose and names that contain it stay.
Needs Python 3.10 and git; nothing has to be installed.
"""

import argparse
import ast
import io
import keyword
import re
import sys
import tokenize
from importlib.metadata import packages_distributions
from pathlib import Path

import work_tree
from work_tree import File, Files

# Calls whose argument is the name of a package, or of the distribution that holds it.
TAKES_PACKAGE = {"getLogger", "import_module", "find_spec", "files", "importorskip"}
TAKES_DISTRIBUTION = {"version", "distribution", "metadata", "requires"}
# What looks like a module and is a file: project.yaml.
SUFFIXES = {
    "toml",
    "yaml",
    "yml",
    "md",
    "json",
    "csv",
    "txt",
    "py",
    "cfg",
    "ini",
    "zip",
    "pt",
    "ckpt",
}
LINE_LENGTH = 100


def main() -> None:
    """Rename the package of the repository that this file is in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="a Python identifier, such as my_study")
    parser.add_argument("--force", action="store_true", help="also with uncommitted changes")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    before = work_tree.read(root)
    old, new = current_name(before, arguments.name), arguments.name
    if old == new:
        print(f"The package is called {new} already.")
        return
    check_name(new, before, old)
    work_tree.refuse_changes(root, arguments.force)
    changed = work_tree.write(root, before, rename(before, old, new))
    for left in (root / "src").glob(f"{old}.egg-info/*"):
        left.unlink()  # an installation under the old name
    print(f"{old} is now {new}: {len(changed)} files. Next: make test")


def current_name(files: Files, new: str) -> str:
    """The package's name; beside a folder that has the new name already, that of the other."""
    others = {path: file for path, file in files.items() if not path.startswith(f"src/{new}/")}
    is_done = len(others) < len(files) and not any(
        path.endswith("/__init__.py") and path.count("/") == 2 and path.startswith("src/")
        for path in others
    )
    return new if is_done else work_tree.package(others)


def check_name(name: str, files: Files, old: str) -> None:
    """Exit with the reason where ``name`` cannot be the name of the package."""
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", name):
        sys.exit(
            f"{name!r} is not a name that Python can import and pip can install: "
            "use letters, numbers and underscores, such as my_study."
        )
    if keyword.iskeyword(name):
        sys.exit(f"{name} is a keyword of Python. Use another name, such as {name}_study.")
    if name.lower() in {module.lower() for module in sys.stdlib_module_names}:
        sys.exit(
            f"{name} is a module of Python's standard library. "
            f"Use another name, such as {name}_study."
        )
    merged = {name} if f"src/{name}/__init__.py" in files else set()
    if name.lower() in {module.lower() for module in taken(files) - {old} - merged}:
        sys.exit(
            f"{name} is a dependency, or a file or folder of this repository, which it would hide. "
            f"Use another name, such as {name}_study."
        )


def taken(files: Files) -> set[str]:
    """Names of modules that are installed, locked or imported, and of what stands in the root."""
    names = {path.partition("/")[0].removesuffix(".py") for path in files}
    installed = packages_distributions()
    own = distribution(files)
    names |= {module for module, owners in installed.items() if set(owners) != {own}}
    if "requirements.lock" in files:
        locked = files["requirements.lock"].data.decode()
        names |= {name.replace("-", "_") for name in re.findall(r"(?m)^([\w.-]+)==", locked)}
    for path, file in files.items():
        if path.endswith(".py"):
            for node in ast.walk(ast.parse(file.data)):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return names


def distribution(files: Files) -> str:
    """The name that pip knows."""
    found = re.search(
        r'(?m)^\[project\]\n(?:[^\[].*\n|\n)*?name = "([^"]*)"',
        files["pyproject.toml"].data.decode(),
    )
    return found[1] if found else ""


def rename(files: Files, old: str, new: str) -> Files:
    """Return the files with the package renamed."""
    renamer = Renamer(files, old, new)
    renamed: Files = {}
    for path, file in files.items():
        target = (
            f"src/{new}/{path.removeprefix(f'src/{old}/')}"
            if path.startswith(f"src/{old}/")
            else path
        )
        data = renamer.rename(path, file.data)
        if target != path and target in files and files[target].data not in (data, file.data):
            sys.exit(f"{path} and {target} both exist and differ. Keep one of them.")
        renamed[target] = File(data, file.mode)
    return renamed


class Renamer:
    """Rewrites the text of files; ``files`` tell which modules the package has."""

    def __init__(self, files: Files, old: str, new: str) -> None:
        self.old, self.new = old, new
        below = [path.split("/")[2] for path in files if path.startswith(f"src/{old}/")]
        self.modules = {name.removesuffix(".py") for name in below}
        self.old_distribution = distribution(files)
        is_ours = self.old_distribution.replace("-", "_") == old
        self.new_distribution = new.replace("_", "-") if is_ours else self.old_distribution
        p = re.escape(old)
        self.dotted = re.compile(rf"(?<![\w.\-/]){p}((?:\.[A-Za-z_]\w*)+)")
        self.others = re.compile(
            rf"(?<![\w-])(?<=src/){p}(?![\w-])"  # a path
            rf"|(?<=\bfrom ){p}(?=\.\w|[ ]import\b)"
            rf"|(?<=\bimport ){p}(?=\.\w|[ ]as\b|[ ]*(?:[,;\"'`#]|$))"
            rf"|(?<=[ ]-m ){p}(?=[ .\"'`]|$)"
            rf"|(?<=`){p}(?=`)",
            re.MULTILINE,
        )

    def rename(self, path: str, data: bytes) -> bytes:
        """Return the new content of one file; what is no text stays."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return data
        if not re.search(rf"{re.escape(self.old)}|{re.escape(self.old_distribution)}", text):
            return data
        if path.endswith(".py"):
            return self.python(text).encode()
        if path.endswith(".toml"):
            return self.toml(text).encode()
        return self.text(text).encode()

    def text(self, text: str) -> str:
        """Rename dotted names, paths and imports in any text."""
        return self.others.sub(self.new, self.dotted.sub(self._dotted, text))

    def _dotted(self, match: re.Match[str]) -> str:
        parts = match[1].split(".")[1:]
        is_name = parts[0] in self.modules or (len(parts) > 1 and parts[-1] not in SUFFIXES)
        return self.new + match[1] if is_name else match[0]

    def toml(self, text: str) -> str:
        """Rename in pyproject.toml: the distribution, its entry points, the tools' settings."""
        lines, table = [], ""
        for line in text.splitlines(keepends=True):
            if header := re.match(r"\[+([^\]]+)\]", line):
                table = header[1].strip()
            elif table == "project" and re.match(r"name\s*=", line):
                line = line.replace(f'"{self.old_distribution}"', f'"{self.new_distribution}"')
            else:
                if re.fullmatch(r"project\.(gui-)?scripts", table):
                    line = re.sub(
                        rf"^{re.escape(self.old_distribution)}(?=\s*=)", self.new_distribution, line
                    )
                elif table.startswith("tool."):
                    line = re.sub(rf'(?<="){re.escape(self.old)}(?=["*])', self.new, line)
                line = re.sub(rf'(?<="){re.escape(self.old)}(?=[.:]\w|\.\*)', self.new, line)
                line = re.sub(
                    rf'(?<="){re.escape(self.old_distribution)}(?=\[)', self.new_distribution, line
                )
                line = self.text(line)
            lines.append(line)
        return "".join(lines)

    def python(self, text: str) -> str:
        """Rename imports, uses of what they bind, and names in strings and comments."""
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        edits: list[tuple[int, int, str]] = []
        for kind, first, last, new in self._edits(text):
            start, end = (starts[row - 1] + column for row, column in (first, last))
            edits.append((start, end, new or (self.string if kind else self.text)(text[start:end])))
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
        return self.wrap_imports(text)

    def _edits(self, text: str):  # type: ignore[no-untyped-def]
        """Yield (whether a string, start, end, new text or "" to be rewritten by rule)."""
        skipped = {tokenize.NL, tokenize.INDENT, tokenize.DEDENT}
        tokens = [
            t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in skipped
        ]
        is_bound = re.search(
            rf"(?m)^\s*import (.*, *)?{re.escape(self.old)}(\.\w+)*( *,| *$| *#)", text
        )
        before = ["", "", ""]  # the strings of the last three tokens
        statement, f_start, depth = "", None, 0
        for i, token in enumerate(tokens):
            name = tokenize.tok_name[token.type]
            if name == "FSTRING_START":
                f_start = f_start or token.start
                depth += 1
            elif name == "FSTRING_END":
                depth -= 1
                if not depth:
                    yield True, f_start, token.end, ""
                    f_start = None
            elif depth:
                pass
            elif name == "COMMENT":
                yield False, token.start, token.end, ""
                continue
            elif name == "STRING":
                if token.string[1:-1] == self.old:
                    if before[-1] == "(" and before[-2] in TAKES_PACKAGE:
                        yield (
                            True,
                            token.start,
                            token.end,
                            token.string[0] + self.new + token.string[0],
                        )
                    elif before[-1] == "(" and before[-2] in TAKES_DISTRIBUTION:
                        yield (
                            True,
                            token.start,
                            token.end,
                            token.string[0] + self.new_distribution + token.string[0],
                        )
                    elif before[-1] in ("/", ",") and before[-2].strip("\"'") == "src":
                        yield (
                            True,
                            token.start,
                            token.end,
                            token.string[0] + self.new + token.string[0],
                        )
                else:
                    yield True, token.start, token.end, ""
            elif name == "NAME":
                if before[-1] in ("", "\n", ";", ":") and token.string in ("from", "import"):
                    statement = token.string
                if token.string == self.old:
                    following = tokens[i + 1].string
                    if statement == "from":
                        is_package = before[-1] == "from"
                    elif statement == "import":
                        is_package = before[-1] in ("import", ",")
                    else:
                        is_package = bool(is_bound) and before[-1] != "." and following != "="
                    if is_package:
                        yield False, token.start, token.end, self.new
            if name == "NEWLINE" or token.string == ";":
                statement = ""
            before = [*before[1:], "\n" if name == "NEWLINE" else token.string]

    def string(self, text: str) -> str:
        """Rename in a string: as in any text; and where it is nothing but a dotted name."""
        whole = re.fullmatch(rf"(\w*[\"'])({re.escape(self.old)})\.([a-z_]\w*)([\"'])", text)
        if whole and whole[3] not in SUFFIXES:
            return f"{whole[1]}{self.new}.{whole[3]}{whole[4]}"
        return self.text(text)

    def wrap_imports(self, text: str) -> str:
        """Give each name a line of its own where a longer name made an import too long."""

        def wrap(match: re.Match[str]) -> str:
            if len(match[0]) <= LINE_LENGTH:
                return match[0]
            names = "".join(f"{match[1]}    {name.strip()},\n" for name in match[3].split(","))
            return f"{match[1]}{match[2]}(\n{names}{match[1]})"

        return re.sub(rf"(?m)^( *)(from {self.new}\S* import )([\w, ]+)$", wrap, text)


if __name__ == "__main__":
    main()
