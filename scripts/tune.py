"""Find settings of an experiment by trying them; nothing of the trials is kept.

    python scripts/tune.py workers experiment=synthetic       data.num_workers
    python scripts/tune.py batch-size experiment=synthetic    data.batch_size that fits in memory
    python scripts/tune.py lr experiment=synthetic            model.optimizer.lr

What follows the first word is what train.py takes. The last line on the screen is for pasting
behind train.py; the curve of lr goes to <output_dir>/tune/. Exit status: 0 found; 1 a mistake in
the command, or nothing found; 2 unknown options.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune what the arguments name and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(required=True, metavar="{workers,batch-size,lr}")
    workers = what.add_parser("workers", help="how many processes read the data")
    workers.add_argument("--seconds", type=_positive, default=1.0, help="for each, three times")
    workers.set_defaults(run=tune_workers)
    batch_size = what.add_parser("batch-size", help="how many samples fit in memory")
    batch_size.set_defaults(run=tune_batch_size)
    lr = what.add_parser("lr", help="at which learning rate the loss falls the fastest")
    lr.add_argument("--lowest", type=_positive, default=1e-6)
    lr.add_argument("--highest", type=_positive, default=1.0)
    lr.add_argument("--steps", type=int, default=100, help="at growing rates")
    lr.set_defaults(run=tune_learning_rate)
    for command in (workers, batch_size, lr):
        command.add_argument("overrides", nargs="*", metavar="key=value", help="as of train.py")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def tune_workers(options: argparse.Namespace) -> int:
    """Measure reading the data set with 0, 1, 2, 4, … workers."""
    from harness.data.measuring import candidates, knee, measure_all, table
    from harness.machine.limits import usable_cores
    from harness.run.mistakes import user_errors
    from harness.run.tasks import make
    from harness.tuning.trial import composed, num_processes

    cfg = composed(options.overrides)
    num_ranks = num_processes(cfg.trainer)
    num_ranks_here = max(1, num_ranks // cfg.trainer.num_nodes)
    with user_errors():
        data = make(cfg.data)
        found = measure_all(
            lambda number: data.endless_loader(number, "train", num_ranks),
            candidates(max(1, usable_cores() // num_ranks_here)),
            options.seconds,
        )
    chosen = knee(found)
    print(table(found, chosen, cfg.data.batch_size // num_ranks))
    if chosen == 0:
        print("Reading costs a step no more than receiving batches from workers would.")
    print(f"data.num_workers={chosen}")
    return 0


def tune_batch_size(options: argparse.Namespace) -> int:
    """Find the largest batch that fits."""
    from harness.tuning.searches import LARGEST, find_batch_size
    from harness.tuning.trial import composed

    cfg = composed(options.overrides)
    found = find_batch_size(cfg)
    where = " in each process" if found.num_processes > 1 else ""
    print(f"{found.per_process} samples fit{where}", end="; ")
    if found.is_out_of_memory:
        print(f"{2 * found.per_process} do not.")
    elif 2 * found.per_process > found.num_samples:
        print(f"the data set has no more than {found.num_samples}, and memory was not the limit.")
    else:
        print(f"the search ends at {LARGEST}, and memory was not the limit.")
    if found.num_processes > 1:
        print(f"data.batch_size counts those of all {found.num_processes} processes.")
    print(f"data.batch_size={found.of_all_processes}")
    return 0


def tune_learning_rate(options: argparse.Namespace) -> int:
    """Find the learning rate at which the loss falls the fastest."""
    from harness.tuning.searches import find_learning_rate
    from harness.tuning.trial import composed

    if not options.lowest < options.highest:
        raise UserError(f"--lowest {options.lowest} must be below --highest {options.highest}.")
    if options.steps < 20:
        raise UserError(f"--steps {options.steps} are too few to see a slope: use 20 or more.")
    cfg = composed(options.overrides)
    suggestion, picture = find_learning_rate(cfg, options.lowest, options.highest, options.steps)
    path = Path(cfg.output_dir, "tune", "lr.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150)
    print(f"picture: {path}")
    print(f"model.optimizer.lr={suggestion:.2g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
