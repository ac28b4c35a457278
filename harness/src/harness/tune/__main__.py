"""Measure batch sizes, data workers and a learning rate for an experiment, in a minute or two.

    python scripts/tune.py experiment=mine
    python scripts/tune.py experiment=mine data.batch_size=256 trainer.precision=bf16-mixed

It takes the overrides of train.py, measures on one device, writes nothing, and ends with a line of
overrides to paste. Exit status: 0; 1 if the module or the data fails; 2 after a mistake in the
command; 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence

from harness.command.check import check
from harness.command.compose import compose_command
from harness.display import typed_command
from harness.distributed.launcher import launcher
from harness.errors import UserError, print_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables and overrides, and return the exit status."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        typed_command("harness.tune"), None, __doc__, formatter_class=kind
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    options, unknown = parser.parse_known_args(arguments)
    try:
        if unknown:
            raise UserError(
                f"tune has no option {' '.join(unknown)}: it measures one experiment.\n"
                "Use key=value, with one value for each key."
            )
        if launcher().has_several_processes:
            raise UserError(
                "tune measures on one device, but torchrun or srun has started several "
                "processes.\nStart tune without torchrun and srun."
            )
        command = compose_command("train", options.overrides)
        check(command)
        from harness.tune.search import tune  # imports torch and Lightning, which takes seconds

        tune(command)
    except UserError as error:
        print_text(str(error), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit):  # Lightning exits on Ctrl-C
        print("Stopped. tune has written nothing.", file=sys.stderr)
        return 130
    except Exception as error:
        from harness.training import user_errors

        message = user_errors.describe_user_error(error)
        if message is None:
            raise
        print_text(message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
