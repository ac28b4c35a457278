"""Faults on purpose: ``python -m tests_harness.faults --help``."""
