"""Tests of the library's data modules, with the experiments that the template has for them."""

from tests.conftest import ROOT

# The small project has no images, tables or texts; `make test` of the template names its own.
if not (ROOT / "conf" / "experiment" / "images.yaml").is_file():
    collect_ignore_glob = ["test_*.py"]
