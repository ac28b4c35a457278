"""Only harness/compat uses private names of other packages."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import LIBRARY

# Lightning gives its loops and counters no underscore, and documents none of them.
UNDOCUMENTED = {"epoch_loop", "val_loop", "batch_progress", "epoch_progress", "optim_progress"}
ALLOWED = {
    "_exit": "os._exit is documented",
    "_asdict": "the documented dict of a namedtuple",
    "_open": "the documented method of logging.FileHandler",
    "_fields": "the documented names of a namedtuple",
    "_replace": "the documented copy of a namedtuple",
    "_cpu": "the end of a strategy's name",
    "_step": "the end of a hook's name",
    "_dataloader": "as _step",
    "_batches": "as _step, of a setting",
    "_Pickler": "Python's own pickle, in convert/, which imports only two files of the library",
    "_Unpickler": "as _Pickler",
}
# In these files, texts are names in checkpoints that are read and written.
DATA_ONLY = ("src/harness/convert/", "src/harness/init/settings.py")


def sources() -> list[Path]:
    return sorted((LIBRARY / "src").rglob("*.py"))


def is_private(name: str) -> bool:
    """Keys such as ``_target_`` are Hydra's documented ones."""
    return re.fullmatch(r"_[A-Za-z]\w*(?<!_)", name) is not None


def own_names(tree: ast.AST) -> set[str]:
    """The private names that a file gives to something of its own."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return names


def foreign(tree: ast.AST) -> dict[str, str]:
    """Return the imports from packages that are neither Python's nor ours, by local name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = {
                (alias.asname or alias.name).split(".")[0]: alias.name for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
        else:
            continue
        ours = {"harness", "project", *sys.stdlib_module_names}
        found |= {name: path for name, path in modules.items() if path.split(".")[0] not in ours}
    return found


def touches(
    text: str, inherited: frozenset[str] = frozenset(), texts_are_data: bool = False
) -> Iterator[tuple[int, str]]:
    """The lines of a source that touch something private, and what it is.

    ``inherited`` are private names that an own base class in another file may have defined.
    """
    tree = ast.parse(text)
    own, imported = own_names(tree), foreign(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for path in foreign(node).values():
                yield from ((node.lineno, n) for n in path.split(".") if is_private(n))
        elif isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) else ""
            known = own | inherited if base in ("self", "cls") else own
            if node.attr in UNDOCUMENTED or (is_private(node.attr) and node.attr not in known):
                yield node.lineno, node.attr
            elif isinstance(node.ctx, ast.Store) and base in imported:
                yield node.lineno, f"{base}.{node.attr} ="
        elif isinstance(node, ast.Constant) and not texts_are_data:
            name = str(node.value)
            yield from [(node.lineno, name)] if is_private(name) and name not in own else []


def all_touches() -> Iterator[str]:
    texts = {path: path.read_text() for path in sources()}
    inherited = frozenset(name for text in texts.values() for name in own_names(ast.parse(text)))
    for path, text in texts.items():
        place = str(path.relative_to(LIBRARY))
        if not place.startswith("src/harness/compat/"):
            for line, name in touches(text, inherited, place.startswith(DATA_ONLY)):
                if name not in ALLOWED:
                    yield f"{place}:{line}: {name}"


def test_only_upstream_touches_what_is_private() -> None:
    assert list(all_touches()) == []


def test_touches_are_found() -> None:
    for text, name in {
        "trainer._results": "_results",
        "trainer.fit_loop._restarting = False": "_restarting",
        "from torch.nn.modules.batchnorm import _BatchNorm": "_BatchNorm",
        "from hydra._internal.utils import x": "_internal",
        "import torch._C": "_C",
        "getattr(module, '_compiler_ctx', None)": "_compiler_ctx",
        "module.__dict__['_current_fx_name'] = 1": "_current_fx_name",
        "trainer.fit_loop.epoch_loop.batch_progress": "epoch_loop",
        "from pytorch_lightning.trainer import call\ncall.hook = None": "call.hook =",
    }.items():
        assert name in [found for _, found in touches(text)], text
