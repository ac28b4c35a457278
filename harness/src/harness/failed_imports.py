"""Describe a module that is not installed, or a package whose import raises. Imports no torch."""

import re
import traceback
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

EXTRAS = {"timm": "timm", "tokenizers": "text"}  # package -> the extra that installs it
# Packages that are installed by another name than the module's.
DISTRIBUTIONS = {
    **{"cv2": "opencv-python", "PIL": "pillow", "skimage": "scikit-image"},
    **{"sklearn": "scikit-learn", "yaml": "pyyaml"},
}
# Packages that no run does without.
NEEDED = ("torch", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy", "yaml")
BUILT_FOR = ("torch", "numpy")  # a package with compiled code fits only some of their versions


def describe_failed_import(error: BaseException) -> str:
    """Return two lines with the package whose import raised and a cure, or "" for other errors."""
    if not (package := _failing_package(error)):
        return ""
    text = " ".join(str(error).split())[:300]
    name = " ".join(filter(None, [package, _version(package)]))
    cure = cure_of_import(error)
    return f"{name} cannot be imported: {type(error).__name__}: {text}\n{cure}"


def cure_of_import(error: BaseException) -> str:
    """Return what to install if an import has failed, or "" for other errors."""
    if cure := missing_module(str(error)):
        return cure
    if not (package := _failing_package(error)):
        return ""
    distribution, version = DISTRIBUTIONS.get(package, package), _version(package)
    if package in NEEDED:
        pinned = f"{distribution}=={version}" if version else distribution
        return f"Install {package} again: pip install --force-reinstall {pinned}"
    installed = " and ".join(f"{name} {_version(name)}" for name in BUILT_FOR)
    return (
        f"Most often {package} was built for another torch or numpy. Install its build for "
        f"{installed}, from\nthe index that torch came from, or remove it from requirements.txt "
        f"and type: pip uninstall {distribution}"
    )


def missing_module(message: str) -> str:
    """Return how to install the module that a ModuleNotFoundError's message names, or ""."""
    found = re.match(r"No module named '(\w+)", message)
    if not found or found[1] == "src" or find_spec(found[1]) is not None:  # a part of it is missing
        return ""
    if extra := EXTRAS.get(found[1]):
        return f"Install it: pip install -e '.[{extra}]'"
    name = DISTRIBUTIONS.get(found[1], found[1])
    return f"Add {name} to requirements.txt and type make train, or type: pip install {name}"


def installed_package(path: Path) -> tuple[Path, str]:
    """Return the site-packages folder and the package's name, which is "" if none is installed."""
    for folder in path.parents:
        if folder.name.endswith("-packages"):
            return folder, path.relative_to(folder).parts[0].removesuffix(".py")
    return path, ""


def _failing_package(error: BaseException) -> str:
    """Return the installed package whose module raised while it was imported, or ""."""
    for line in reversed(traceback.extract_tb(error.__traceback__)):
        if line.name == "<module>":
            _, package = installed_package(Path(line.filename).resolve())
            return package if package != "harness" else ""
    return ""


def _version(package: str) -> str:
    try:
        return metadata.version(DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return ""
