from tests_harness.machine.conftest import _no_variables, lock_folder, machine

__all__ = ["_no_variables", "lock_folder", "machine"]  # the same fake machines
