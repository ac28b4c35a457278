"""Everything that touches what Lightning, torch and torchmetrics keep private.

Each file mends one thing, says what breaks without it, and lists in ``PRIVATE`` the names that it
relies on, by the module, or the path from a Trainer or another object, that has them. For a new
version, raise its bound in versions.py and in requirements.txt, and run ``pytest
harness/tests/upstream harness/tests/checkpoints harness/tests/test_same_experiment.py``: what
upstream has renamed fails by its name. Hydra is used by its public names alone.
"""
