"""Tests of what needs a whole project, its scripts and examples."""

from tests.conftest import ROOT

# The small project has few; `make test` of the template names its own folder.
if not (ROOT / "conf" / "experiment" / "images.yaml").is_file():
    collect_ignore_glob = ["test_*.py"]
