"""Write a run's network as files that other programs run: torch.export's and ONNX.

    python scripts/export.py outputs/default/<run>
    python scripts/export.py outputs/default/<run>/checkpoints/best.ckpt -o net.onnx
    python scripts/export.py outputs/default/<run> data.file=new.csv    words as of evaluate.py

Any batch size; each file is read again and compared with the network on the run's data before it
gets its name. Without -o, best.pt2 beside the checkpoint, and best.onnx: pip install -e .[onnx].
Exit status: 0 all are written; 1 a mistake, or what cannot be exported: none is; 2 unknown options.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from harness.errors import UserError
from harness.names import program


def main(arguments: Sequence[str] | None = None) -> int:
    """Export what the arguments name and return the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        program("harness.export"), description=__doc__, formatter_class=formatter
    )
    add = parser.add_argument
    add("source", help="a run's folder, or a checkpoint in it")
    add("words", nargs="*", metavar="key=value", help="as of evaluate.py")
    add("-o", action="append", default=[], metavar="OUT", help="ends in .pt2 or .onnx; repeatable")
    add("--force", action="store_true", help="replace existing files")
    options = parser.parse_intermixed_args(arguments)
    logging.disable(logging.INFO)  # Lightning's, of a Trainer that tests one batch
    try:
        from harness.export.network import export  # torch and Lightning; seconds

        print(*export(options.source, options.o, options.words, force=options.force), sep="\n")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
