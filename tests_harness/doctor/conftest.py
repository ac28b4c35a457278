from tests_harness.machine.conftest import _no_variables, own_locks, machine

__all__ = ["_no_variables", "own_locks", "machine"]  # the same fake machines
