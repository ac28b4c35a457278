"""The imports that take seconds: sooner, and with the package to blame where one fails.

torchmetrics imports torchvision wherever it is installed: with a build for another torch no
command would come as far as its first line. What fails is named here; a healthy one costs nothing.
"""

import gc
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from harness.errors import UserError

PACKAGES = ("torchvision", "torchaudio")


@contextmanager
def explained_imports() -> Iterator[None]:
    """Import torch and what needs it.

    Meanwhile nobody looks for garbage: modules are none, and to go through all of them again and
    again is a sixth of the time. Nor does anybody later, where they are the first objects.

    Raises:
        UserError: with what to type, where the import of a package beside torch fails.
    """
    is_first, was_looking = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
    except Exception as error:
        if message := of(error):
            raise UserError(message) from error
        raise
    finally:
        if is_first and "torch" in sys.modules:
            gc.freeze()
        if was_looking:
            gc.enable()


def of(error: BaseException) -> str | None:
    """Say what is wrong if a package of these has raised an error as it was imported."""
    seen: BaseException | None = error
    while seen is not None:
        for frame, _ in traceback.walk_tb(seen.__traceback__):
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if package in PACKAGES and frame.f_code.co_name == "<module>":
                return told(package, f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__ or seen.__context__
    return None


def told(package: str, reason: str) -> str:
    """Say for which torch a package was built, and what to type."""
    what, remedy = blame(package, reason)
    return f"{what}.\n{remedy}"


def blame(package: str, reason: str) -> tuple[str, str]:
    """What is broken, and what to do about it."""
    try:
        requires = metadata.requires(package) or []
        name = f"{package} {metadata.version(package)}"
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:  # a folder of that name on the path
        return f"{package} cannot be imported ({reason})", f"Type pip uninstall {package}."
    matches = (re.match(r"torch\s*\(?(?:==|>=|~=)\s*([\w.+]+)", text) for text in requires)
    needed = next((match[1] for match in matches if match), None)
    built = f"was built for torch {needed}" if needed else "was built for another torch"
    if needed and needed == torch.partition("+")[0]:
        built = f"was built for another build of torch {needed}"  # for CUDA, or for CPUs
    what = f"{name} {built}, and breaks with torch {torch}, which is installed ({reason})"
    fitting = f"{package}=={_fitting(package, torch)}"
    return what, (
        f"Type pip uninstall {package}, which nothing here needs; or install {fitting} from where "
        "this torch came from."
    )


def _fitting(package: str, torch: str) -> str:
    """The release that belongs to one of torch's: torchvision 0.15 to torch 2.0, and so on."""
    major, minor = (int(part) for part in torch.split(".")[:2])
    is_vision = package == "torchvision" and major == 2
    return f"0.{15 + minor}.*" if is_vision else f"{major}.{minor}.*"
