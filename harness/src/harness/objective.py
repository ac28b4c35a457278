"""Whether an objective is best at its minimum or at its maximum."""

import re

# Parts of the names of metrics to minimise, or to maximise.
DIRECTIONS = {"min": "loss|err|mae|mse|perplexity", "max": "acc|f1|auc|iou|dice|precision|recall"}


def mode_of(metric: str) -> str | None:
    """Return ``min`` or ``max``, the mode of a metric by its name, or ``None`` if unknown."""
    modes = [mode for mode, parts in DIRECTIONS.items() if re.search(parts, metric.lower())]
    return modes[0] if len(modes) == 1 else None
