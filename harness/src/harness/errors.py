class UserError(Exception):
    """A mistake in a command, a YAML file or an environment, which the user can mend.

    The entry points print its message without a traceback and exit with status 1. The message
    says what was set, why it cannot be, and what to type instead.
    """

    def __str__(self) -> str:
        """The message; a data worker's comes with its traceback before it."""
        return super().__str__().rpartition("harness.errors.UserError: ")[2].rstrip()


class TrainingError(Exception):
    """What training has come to, and no command could have told before: it must not go on.

    The process that finds it logs the message; the entry points exit with status 1 and print no
    traceback, because no line of code is to blame.
    """
