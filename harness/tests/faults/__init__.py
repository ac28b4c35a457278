"""Faults on purpose: ``python -m tests.faults --help``."""
