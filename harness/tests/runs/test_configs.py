"""The configs of many runs are parsed faster, with the values that YAML gives them."""

from typing import Any

import pytest

from harness import untrusted
from harness.runs import configs

CONFIG = b"""# Frozen with the run.
seed: 1
tags: []
model:
  net:
    channels:
    - 32
    - 64
  'lr': 0.1
trainer:
  max_epochs: 5
  strategy: auto
"""


def value_of(parse: Any, text: bytes) -> Any:
    try:
        return parse(text)
    except ValueError:
        return ValueError


@pytest.mark.parametrize(
    "text",
    [
        CONFIG,
        b"",
        b"# a comment\n",
        b"a:\n  ---\n",
        b"a:\n  {}\n  ...\n",
        b"- 1\n- 2\n",
        b"a: 'x\nb: y'\n",
        b"a: &x 1\nb: *x\n",
        b"a: &x 1\na: &x 1\n",
        b"a: 1\n<<: {b: 2}\n",
        b"a: 1\n...\nb: 2\n",
        b"a: 1\n---\nb: 2\n",
        b"a:\n  >-\n  b: 1\n  c: 2\n",
        b"a:\n  a text\n  of lines\n",
        b"a: |\n  b: 1\n\n  c: 2\nd: 3\n",
        b"a:\n  b: [1,\n  c: 2]\n",
        b"1:\n  on: off\n1: 2\n",
        "a:\n  b: x\u2028c: 2\n".encode(),
        b"a:\r\n  b: 1\r\nc: 2\r\n",
        b"a:\n  b: 1\n# comment\n  c: 2",
        b"a: {b\nc: 1\n",
    ],
)
def test_the_values_are_those_of_the_whole_file(text: bytes) -> None:
    found, expected = (value_of(parse, text) for parse in (configs.parse, untrusted.parse_yaml))
    assert found == expected
    assert repr(found) == repr(expected)  # in the same order, of the same types


def test_only_lines_that_differ_from_other_configs_are_parsed(monkeypatch) -> None:
    configs.parse(CONFIG)
    parsed = []
    monkeypatch.setattr(untrusted, "parse_yaml", parsed.append)
    configs.parse(CONFIG)
    assert set(parsed) == {b"# Frozen with the run.\n"}
    monkeypatch.undo()
    other = CONFIG.replace(b"- 64", b"- 128")
    assert configs.parse(other)["model"]["net"]["channels"] == [32, 128]
    assert configs.parse(CONFIG)["model"]["net"]["channels"] == [32, 64]


def test_limits_hold_for_the_whole_file() -> None:
    many = b"".join(b"key_%d: 0\n" % number for number in range(untrusted.MAX_VALUES))
    with pytest.raises(ValueError, match="more than 5,000 values"):
        configs.parse(many)
