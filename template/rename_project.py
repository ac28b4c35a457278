"""Give the package another name, everywhere it means the package and nowhere else.

    python scripts/rename_project.py my_study            folder, imports, targets, pyproject, docs
    python scripts/rename_project.py my_study --force    also over changes that are not committed

It reads tokens: imports and what follows from them, dotted names in strings and YAML values,
`src/<name>/` paths, names in pyproject.toml. The word in prose and names that contain it stay.
Needs Python 3.10 and git; nothing has to be installed.
"""

import argparse
import io
import keyword
import re
import shutil
import sys
import tokenize
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

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
# What locked distributions install under other names than their own; a test looks at them.
MODULES = {
    "absl-py": ["absl"],
    "antlr4-python3-runtime": ["antlr4"],
    "attrs": ["attr"],
    "grpcio": ["grpc"],
    "hydra-core": ["hydra", "hydra_plugins"],
    "markdown-it-py": ["markdown_it"],
    "matplotlib": ["mpl_toolkits", "pylab"],
    "mypy": ["mypyc"],
    "nvidia-ml-py": ["example", "pynvml"],
    "omegaconf": ["pydevd_plugins"],
    "pillow": ["PIL"],
    "protobuf": ["google"],
    "pytest": ["py"],
    "pytest-xdist": ["xdist"],
    "python-dateutil": ["dateutil"],
    "pytorch-lightning": ["lightning_fabric"],
    "PyYAML": ["yaml"],
    "scikit-learn": ["sklearn"],
    "sympy": ["isympy"],
    "torch": ["functorch", "torchgen"],
}
INSTALLERS = {"pip", "setuptools", "pkg_resources", "wheel", "distutils"}


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
    check_installed(new, root)
    work_tree.refuse_changes(root, arguments.force)
    changed = work_tree.write(root, before, rename(before, old, new))
    for left in (root / "src").glob(f"{old}.egg-info"):
        shutil.rmtree(left)  # an installation under the old name
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
    """Names of modules that are locked or imported, and of what stands in the root."""
    names = {path.partition("/")[0].removesuffix(".py") for path in files} | INSTALLERS
    for name in locked(files):
        names |= {name.replace("-", "_"), *MODULES.get(name, [])}
    imports = re.compile(rb"(?m)^\s*(?:from|import)\s+(\w+)")
    code = [file.data for path, file in files.items() if path.endswith(".py")]
    return names | {name.decode() for data in code for name in imports.findall(data)}


def locked(files: Files) -> list[str]:
    """Names of the distributions in requirements.lock."""
    lock = files.get("requirements.lock", File(b"")).data.decode()
    return re.findall(r"(?m)^([\w.-]+)==", lock)


def check_installed(name: str, root: Path) -> None:
    """Exit where Python finds a module of that name elsewhere than in the repository."""
    spec = find_spec(name)
    if spec is not None and not str(spec.origin).startswith(f"{root}/"):
        sys.exit(f"{name} is installed already. Use another name, such as {name}_study.")


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


class Token(NamedTuple):
    """A piece of Python, and where it is."""

    kind: str
    text: str
    start: int
    end: int


def split(code: str) -> list[Token]:
    """The tokens of Python code; an f-string is one of them, as it was before Python 3.12."""
    lines = [0]
    for line in code.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    tokens: list[Token] = []
    depth, f_start = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        kind = tokenize.tok_name[token.type]
        start, end = (lines[row - 1] + column for row, column in (token.start, token.end))
        if kind == "FSTRING_START":
            f_start = f_start if depth else start
            depth += 1
        elif kind == "FSTRING_END":
            depth -= 1
            kind, start = "STRING", f_start
        if not depth and kind in ("NAME", "OP", "STRING", "COMMENT", "NEWLINE"):
            text = "\n" if kind == "NEWLINE" else code[start:end]
            tokens.append(Token(kind, text, start, end))
    return tokens


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
            rf"|(?<=`){p}(?=`)"
            rf"|(?:(?<=_target_: )|(?<=_target_=)){p}(?=\.[A-Za-z_])"
            rf"|(?<=--cov=){p}(?![\w-])",
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

    def python(self, code: str) -> str:
        """Rename imports, uses of what they bind, and names in strings and comments."""
        imported = rf"(?m)^\s*import (.*, *)?{re.escape(self.old)}(\.\w+)*( *,| *$| *#)"
        is_bound = re.search(imported, code) is not None
        pieces, end = [], 0
        before, statement = (
            ["", "\n"],
            "",
        )  # the two tokens before this one; from, import or neither
        tokens = split(code)
        for token, following in zip(tokens, [*tokens[1:], None], strict=True):
            new = code[token.start : token.end]
            if token.kind == "COMMENT":
                new = self.text(new)
            elif token.kind == "STRING":
                new = self.string(new, before)
            elif token.text == self.old:
                is_argument = following is not None and following.text == "="
                is_package = {
                    "from": before[1] == "from",
                    "import": before[1] in ("import", ","),
                    "": is_bound and before[1] != "." and not is_argument,
                }
                new = self.new if is_package[statement] else new
            elif before[1] in ("\n", ";", ":") and token.text in ("from", "import"):
                statement = token.text
            elif token.text in ("\n", ";"):
                statement = ""
            pieces += [code[end : token.start], new]
            end = token.end
            if token.kind != "COMMENT":
                before = [before[1], token.text]
        return self.wrap_imports("".join([*pieces, code[end:]]))

    def string(self, text: str, before: list[str]) -> str:
        """Rename in a string: as in any text; and where all of it is a name of the package."""
        call = before[0] if before[1] == "(" else ""
        if text[1:-1] == self.old:
            if call in TAKES_DISTRIBUTION:
                return text[0] + self.new_distribution + text[0]
            is_folder = before[0].strip("\"'") == "src" and before[1] in ("/", ",")
            is_package = is_folder or call in TAKES_PACKAGE or before == ["modules", "["]
            return text[0] + self.new + text[0] if is_package else text
        whole = re.fullmatch(rf"(\w*[\"']){re.escape(self.old)}\.([a-z_]\w*)([\"'])", text)
        if whole and whole[2] not in SUFFIXES:
            return f"{whole[1]}{self.new}.{whole[2]}{whole[3]}"
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
