"""Everything that touches what Lightning, torch and torchmetrics keep private.

Each file says what breaks without it; versions.py lists the private names. For a new version, raise
its bound there and in requirements.txt, and run ``pytest harness/tests/upstream
harness/tests/checkpoints harness/tests/test_same_experiment.py``. Hydra has no part in this.
"""
