"""What a run stumbles over because of its settings, or of its owner's code, in a few lines."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import InstantiationException
from lightning_fabric.utilities.exceptions import MisconfigurationException

from harness.errors import UserError


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn what Hydra, Lightning and torch say of wrong settings into a ``UserError``.

    A bug inside a class keeps its traceback: only what was raised on purpose is shortened, not
    what Python itself stumbled over.
    """
    try:
        yield
    except MisconfigurationException as error:
        raise UserError(str(error)) from error
    except InstantiationException as error:
        cause = error.__cause__
        if cause is None:
            raise UserError(" ".join(str(error).split())) from error
        where = str(error).partition("full_key: ")[2].strip() or "the config"
        raised_at = traceback.extract_tb(cause.__traceback__)[-1]
        on_purpose = (raised_at.line or "").lstrip().startswith("raise")
        if isinstance(cause, (ValueError, MisconfigurationException)) and on_purpose:
            raise UserError(f"{where}: {cause}") from error
        raise cause from None
