"""Import torch and Lightning quickly, and name the package to blame where that fails."""

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from harness.errors import UserError

BESIDE_TORCH = ("torchvision", "torchaudio")  # torchmetrics imports them wherever they are


@contextmanager
def quick_imports() -> Iterator[None]:
    """Turn garbage collection off while torch and what needs it are imported.

    Its passes over new modules cost a sixth of the start. Later passes leave these modules out.

    Raises:
        UserError: the import of a package that was built for another torch fails.
    """
    is_first, was_on = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
    except Exception as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            if package in BESIDE_TORCH:
                raise UserError(
                    f"{package} cannot be imported, as if it were built for another torch "
                    f"({type(error).__name__}: {error}).\nType pip uninstall {package}, which "
                    "nothing here needs, or install the release that belongs to this torch."
                ) from error
        raise
    finally:
        if is_first and "torch" in sys.modules:
            gc.freeze()
        if was_on:
            gc.enable()
