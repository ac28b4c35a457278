"""Everything that touches what Lightning, torch and torchmetrics keep private.

    versions.py         which versions were tested, and what a run does with others
    processes.py        who starts, watches and stops the processes of a run
    resume_counters.py  where Lightning's loops stand after a checkpoint was loaded
    resume_states.py    states that it saves and loads wrongly
    logged_values.py    what is logged in the middle of an epoch, and its means over processes
    replication.py      what dp and ddp2 read of a module and of a strategy
    step_overhead.py    work that is done in every step and for nobody; optional

Each file lists in ``PRIVATE`` the names that it relies on, by the module, or the path from a
Trainer or another object, that has them. For a new version, raise its bound in versions.py and in
pyproject.toml, and run ``pytest tests_harness/upstream tests_harness/checkpoints
tests_harness/test_same_experiment.py``: what upstream has renamed fails by its name. Hydra is used
by its public names alone.
"""
