from tests_harness.machine.conftest import _no_variables, machine, own_locks

__all__ = ["_no_variables", "machine", "own_locks"]  # the same fake machines
