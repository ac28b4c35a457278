"""Each kind of module has the weights of one device, or is refused in a sentence."""

import functools

import pytest

from tests_harness.strategies.kinds import KINDS, STRATEGIES, difference, measure, outcome
from tests_harness.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS


@functools.cache
def one_device(name):
    return outcome(KINDS[name], "cpu")


@pytest.mark.parametrize("strategy", [*STRATEGIES][1:])
def test_each_kind_is_equal_or_refused_in_a_sentence(strategy, tmp_path):
    found = measure(strategy, tmp_path)
    for name, kind in KINDS.items():
        if strategy in kind.refused:
            said = found[name]
            assert isinstance(said, str), f"{name} is no longer refused"
            assert kind.says in said
            assert "Traceback" not in said
            assert len(said.splitlines()) <= 3
        else:
            assert difference(found[name], one_device(name)) < 1e-12, name
