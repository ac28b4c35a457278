from harness.testing import clean_environment, make_cfg, pytest_configure

__all__ = ["clean_environment", "make_cfg", "pytest_configure"]
