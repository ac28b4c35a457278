"""Export a run's network to files that other programs can run: torch.export and ONNX.

    python scripts/export.py outputs/default/<run>
    python scripts/export.py outputs/default/<run>/checkpoints/best.ckpt -o net.onnx

The files take any batch size. Before a file gets its name, the command reads it again and compares
its outputs with the network's on the run's data. Without -o it writes best.pt2 beside the
checkpoint, and best.onnx if ONNX is installed: pip install -e '.[onnx]'.
"""

import argparse
import inspect
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO
from warnings import catch_warnings, simplefilter

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from harness import targets
from harness.command.from_python import load_run
from harness.display import typed_command
from harness.errors import UserError
from harness.files import atomic_write
from harness.training.build import as_user_errors, make_data
from harness.training.check_targets import check_targets
from harness.training.train import load_model
from harness.training.user_errors import read_error

TOLERANCE = 1e-4  # of rounding, relative to an output's largest number
# The Trainer's methods that call the network, each with a step and a loader. The first that the
# module and its data support is used.
STAGES = {
    "test": ("test_step", "test_dataloader", {"verbose": False}),
    "validate": ("validation_step", "val_dataloader", {"verbose": False}),
    "predict": ("predict_step", "predict_dataloader", {"return_predictions": False}),
}
QUICK: Any = {"fast_dev_run": 1, "enable_progress_bar": False, "inference_mode": False}


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a network, and return the exit status: 1 if it wrote no file."""
    parser = argparse.ArgumentParser(
        typed_command("harness.export"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="a run's folder, or a checkpoint in it")
    parser.add_argument("-o", dest="outputs", action="append", metavar="OUT", default=[])
    parser.add_argument("--force", action="store_true", help="replace existing files")
    options = vars(parser.parse_args(arguments))
    logging.disable(logging.INFO)  # Lightning's lines about the Trainer that tests one batch
    try:
        print(*export(**options), sep="\n")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


class Network(nn.Module):
    """The exported function of a module: its method ``exported``, or else its ``forward``.

    The arguments that ``names`` lists are passed by name.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module.eval(), names

    def forward(self, *tensors: Tensor) -> Any:
        """Return the module's outputs."""
        arguments = dict(zip(self.names, tensors, strict=True))
        return getattr(self.module, "exported", self.module)(**arguments)


def export(
    source: str | Path,
    outputs: Sequence[str | Path] = (),
    conf: str | Path = "conf",
    force: bool = False,
) -> list[str]:
    """Export the network of a checkpoint, and return a line for each file.

    Args:
        source: a run's folder, for its best checkpoint, or a checkpoint in it.
        outputs: paths that end in .pt2 or .onnx; by default both, if ONNX is installed.
        conf: the folder of configs.
        force: whether to replace existing files.

    Raises:
        UserError: the network cannot be exported, or an output cannot be used; then no file was
            written.
    """
    targets.load_rules(conf)
    source, has_onnx = Path(source).resolve(), find_spec("onnxscript") is not None
    run = load_run(source if source.is_dir() else source.parent.parent, conf)
    checkpoint = run.checkpoint if source.is_dir() else source
    defaults = [checkpoint.with_suffix(suffix) for suffix in (".pt2", ".onnx")[: 1 + has_onnx]]
    paths = [*map(Path, outputs or defaults)]
    for path in paths:
        if path.suffix not in (".pt2", ".onnx"):
            raise UserError(f"-o {path} must end in .pt2 or .onnx.")
        if path.exists() and not force:
            raise UserError(f"{path} exists already. --force replaces it.")
    with as_user_errors():
        check_targets(run.config)
        data = make_data(run.config)
    module, inputs = first_call(load_model(run.config, checkpoint), data)
    network, first = Network(module, [*inputs]), next(iter(inputs.values()))
    # torch.export would make a batch size of 1 a constant, so it traces two samples or more. The
    # other sizes show whether forward itself makes the batch size a constant.
    batches = [
        tuple(tensor[torch.arange(num) % len(tensor)] for tensor in inputs.values())
        for num in (max(2, len(first)), 1, 3)
    ]
    rows = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    with torch.no_grad(), ExitStack() as files:
        with refused(f"{type(module).__name__} cannot be exported"):
            program = torch.export.export(network, batches[0], dynamic_shapes=(rows,))
        program.example_inputs = None  # otherwise the file would contain samples of the data
        for path in paths:
            file = files.enter_context(atomic_write(path, is_forced=force))
            with refused(f"{path} was not written"):
                compute = write(program, path.suffix, [*inputs], file)
            for batch in batches:
                with refused(f"{path} was not written: batch size {len(batch[0])} fails"):
                    compare(compute(*batch), network(*batch))
    shapes = [
        f"{name} {t.dtype} (batch, {str([*t.shape[1:]])[1:-1]})" for name, t in inputs.items()
    ]
    lines = [f"{path}  {path.stat().st_size / 1e6:,.2f} MB; {'; '.join(shapes)}" for path in paths]
    no_onnx = "No .onnx file, because ONNX is not installed: pip install -e '.[onnx]'"
    return lines + [no_onnx] * (not outputs and not has_onnx)


def first_call(model: pl.LightningModule, data: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Test one batch. Return the network, and the inputs of its first call by their names.

    A module without a test validates or predicts one batch.
    """
    networks = [child for child in model.children() if any(True for _ in child.parameters())]
    module = model if is_overridden("forward", model) or len(networks) != 1 else networks[0]
    forward = module.forward
    signature = inspect.signature(forward)
    inputs: dict[str, Any] = {}

    def recording_forward(*args: Any, **kwargs: Any) -> Any:
        if not inputs:
            record(signature.bind(*args, **kwargs))
        return forward(*args, **kwargs)

    def record(bound: inspect.BoundArguments) -> None:
        values = {**bound.arguments, **bound.kwargs}  # the latter has the items of **inputs
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                values.pop(parameter.name, None)
        for name, value in values.items():  # clone, because the step may change a tensor
            inputs[name] = value.clone() if isinstance(value, Tensor) else value

    vars(module)["forward"] = recording_forward  # no hook, because self.forward(x) calls none
    with as_user_errors(), catch_warnings():
        simplefilter("ignore")
        for stage, (step, loader, options) in STAGES.items():
            has_loader = is_overridden(loader, model) or (data and is_overridden(loader, data))
            if not inputs and has_loader and is_overridden(step, model):
                trainer = pl.Trainer(accelerator="cpu", devices=1, **QUICK)
                getattr(trainer, stage)(model, data, **options)
    del vars(module)["forward"]
    name = type(model).__name__
    if not inputs:
        raise UserError(
            f"{name} never calls self(...) in test_step, validation_step or predict_step, or has "
            "no data for these steps. Write one of these methods, such as `def test_step(self, "
            "batch, batch_idx): self(batch[0])`, and its loader."
        )
    if exported := getattr(module, "exported", None):
        names = [*inspect.signature(exported).parameters]
        if not {*names} <= inputs.keys():  # match the arguments by their order in the call
            inputs = dict(zip(names, inputs.values(), strict=False))
        inputs = {name: inputs[name] for name in names if name in inputs}
    tensors = [key for key, value in inputs.items() if isinstance(value, Tensor) and value.ndim]
    if others := [key for key in inputs if key not in tensors]:
        arguments = ", ".join(tensors) or "x"
        cure = f"forward(self, {arguments}) that takes only tensors, and call self({arguments}) in "
        cure += "the step"
        if module is model:
            cure = f"exported(self, {arguments}) that takes only tensors and returns the outputs"
        raise UserError(
            f"{name} passes these arguments to its network: {', '.join(others)}. They are not "
            "tensors with a batch dimension, so they cannot be exported.\n"
            f"Give {name} a method {cure}."
        )
    return module, inputs


def write(program: Any, suffix: str, names: list[str], file: BinaryIO) -> Any:
    """Write a traced network, read the file again, and return the file's network as a function."""
    if suffix == ".pt2":
        torch.export.save(program, file)
        file.flush()
        return torch.export.load(io.BytesIO(Path(file.name).read_bytes())).module()
    import onnxruntime

    onnx_program: Any = torch.onnx.export(program, input_names=names, dynamo=True, verbose=False)
    onnx_program.save(file.name)
    session = onnxruntime.InferenceSession(file.name)

    def compute(*tensors: Tensor) -> list[Tensor]:
        arrays = {name: t.numpy() for name, t in zip(names, tensors, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, arrays)]

    return compute


def compare(found: Any, expected: Any) -> None:
    """Raise an AssertionError with the difference if outputs differ by more than rounding."""
    for actual, wanted in zip(leaves(found), leaves(expected), strict=True):
        a, b = actual.double(), wanted.double()
        tolerance = TOLERANCE * float(b.nan_to_num(0, 0, 0).abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True)


def leaves(value: Any) -> list[Tensor]:
    """Return the tensors in nested dictionaries, lists and tuples."""
    items = value.values() if isinstance(value, dict) else value
    return [value] if isinstance(value, Tensor) else [x for item in items for x in leaves(item)]


@contextmanager
def refused(problem: str) -> Iterator[None]:
    """Turn any exception of torch or of a runtime into a UserError; print nothing else."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()) as noise, redirect_stderr(noise), catch_warnings():
            simplefilter("ignore")
            yield
    except Exception as error:
        message = " ".join(str(error.__cause__ or error).split())[:300]
        reason = ": ".join(filter(None, [read_error(error).user_line, message]))
        raise UserError(f"{problem}: {reason}") from error
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(main())
