"""Make a run again from what it has kept, and compare: ``scripts/runs.py reproduce``."""
