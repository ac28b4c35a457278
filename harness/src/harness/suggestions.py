"""Suggest a name that is close to one that does not exist."""

import difflib
from collections.abc import Iterable

# Names that users type for the keys of configs.
SYNONYMS = {"learning_rate": "lr", "epochs": "max_epochs", "steps": "max_steps"}


def suggest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return " Did you mean ...?" with a synonym or a similar name among ``names``, or ``""``."""
    candidates = list(names)
    synonyms = [candidate for candidate in candidates if candidate == SYNONYMS.get(name)]
    close = synonyms or difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{close[0]}?" if close else ""
