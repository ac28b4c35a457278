from harness.testing import clean_environment, make_cfg

__all__ = ["clean_environment", "make_cfg"]
