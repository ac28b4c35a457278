"""What the harness promises, held against the project's own experiments: a class for each.

All strategies at once: python scripts/prove.py experiment=synthetic
"""

import pytest

from harness.testing import Promises

pytestmark = pytest.mark.slow  # a minute: pytest -m slow tests/test_promises.py


class TestSynthetic(Promises):
    experiment = "synthetic"
    strategies = ("ddp(2)",)  # all of them take two minutes
