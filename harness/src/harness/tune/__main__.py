"""Find settings of an experiment by trying them; nothing of the trials is kept.

    python scripts/tune.py workers experiment=synthetic       data.num_workers
    python scripts/tune.py batch-size experiment=synthetic    data.batch_size that fits in memory
    python scripts/tune.py lr experiment=synthetic            model.optimizer.lr

What follows the first word is what train.py takes. The last line on the screen is for pasting
behind train.py; the curve of lr goes to <output_dir>/tune/. Exit status: 0 found; 1 a mistake in
the command, or nothing found; 2 unknown options; 130 Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError
from harness.names import program
from harness.quick_imports import quick_imports


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune what the arguments name and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with quick_imports():
            options.run(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        program("harness.tune"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_subparsers(required=True, metavar="{workers,batch-size,lr}")
    workers = what.add_parser("workers", help="how many processes read the data")
    workers.set_defaults(run=tune_workers)
    batch_size = what.add_parser("batch-size", help="how many samples fit in memory")
    batch_size.set_defaults(run=tune_batch_size)
    lr = what.add_parser("lr", help="at which learning rate the loss falls the fastest")
    lr.add_argument("--lowest", type=float, default=1e-6)
    lr.add_argument("--highest", type=float, default=1.0)
    lr.add_argument("--steps", type=int, default=100, help="at growing rates")
    lr.set_defaults(run=tune_learning_rate)
    for command in (workers, batch_size, lr):
        command.add_argument("overrides", nargs="*", metavar="key=value", help="as of train.py")
    return parser


def tune_workers(options: argparse.Namespace) -> None:
    """Measure reading the data set with 0, 1, 2, 4, … workers."""
    from harness.tune import trials

    chosen = trials.choose_workers(trials.composed(options.overrides))
    print(f"data.num_workers={chosen}")


def tune_batch_size(options: argparse.Namespace) -> None:
    """Find the largest batch that fits."""
    from harness.tune import trials

    found = trials.find_batch_size(trials.composed(options.overrides))
    more = f"{2 * found.per_process} do not" if found.is_out_of_memory else "memory is no limit"
    print(f"{found.per_process} samples fit in each process; {more}.")
    print(f"data.batch_size={found.of_all_processes}")


def tune_learning_rate(options: argparse.Namespace) -> None:
    """Find the learning rate at which the loss falls the fastest."""
    from harness.tune import trials

    lowest, highest, num_steps = options.lowest, options.highest, options.steps
    if not 0 < lowest < highest:
        raise UserError(f"--lowest {lowest} must be above 0 and below --highest {highest}.")
    if num_steps < 20:
        raise UserError(f"--steps {num_steps} are too few to see a slope: use 20 or more.")
    cfg = trials.composed(options.overrides)
    suggestion, picture = trials.find_learning_rate(cfg, lowest, highest, num_steps)
    path = Path(cfg.output_dir, "tune", "lr.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150)
    print(f"picture: {path}")
    print(f"model.optimizer.lr={suggestion:.2g}")


if __name__ == "__main__":
    sys.exit(main())
