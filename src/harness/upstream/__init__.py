"""Everything that touches what Lightning, torch, torchmetrics and TensorBoard keep private.

    versions.py         which versions were tested, and what a run does with others
    launchers.py        processes that Lightning starts and watches
    signals.py          Lightning's handlers of signals
    resume_counters.py  where its loops stand after a checkpoint was loaded
    resume_states.py    states that it saves and loads wrongly
    logged_values.py    what is logged in the middle of an epoch, which its checkpoints leave out
    logged_means.py     logged means over processes with unequal numbers of samples
    replication.py      what dp and ddp2 read of a module and of a strategy
    step_overhead.py    work that is done in every step and for nobody; optional
    event_files.py      the records of TensorBoard's files

Each file lists in ``PRIVATE`` the names that it relies on: ``module:path``, or ``trainer:path`` for
a Trainer, or a path from a function of the file itself. ``()`` calls. For a new version, raise
its bound in versions.py and in pyproject.toml, and run ``pytest tests_harness/upstream
tests_harness/checkpoints tests_harness/test_same_experiment.py``: what upstream has renamed fails
by its name.
"""
