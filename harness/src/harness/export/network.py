"""Write the network of a run as files for other programs: torch.export's and ONNX.

In: a run or a checkpoint. Out: files beside it, each read again and compared with the network
before it gets its name.
"""

import inspect
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO
from warnings import catch_warnings, simplefilter

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from harness.command import run_folder
from harness.command.check import check
from harness.command.compose import compose_command, in_quotes
from harness.convert.checkpoint import stem_of
from harness.errors import UserError
from harness.files import replacing
from harness.run.build import make_data, user_errors
from harness.run.mistakes import read_error
from harness.run.targets import check_targets
from harness.run.train import load_model

CLOSE = 1e-4  # a difference that rounding explains, as a share of an output's largest number


class Network(nn.Module):
    """What other programs get of a module: its method ``exported``, or what calling it does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.eval()

    def forward(self, *tensors: Tensor) -> Any:
        """Call the module."""
        return getattr(self.module, "exported", self.module)(*tensors)


def export(
    source: str | Path,
    outputs: Sequence[str | Path] = (),
    words: Sequence[str] = (),
    conf: str | Path = "conf",
    force: bool = False,
) -> list[str]:
    """Write the network of a run's best checkpoint, or of one; return a line for each file.

    Without ``outputs``, which end in .pt2 or .onnx, both are written beside the checkpoint, or the
    first where ONNX is not installed. ``words`` are settings as evaluate.py takes them.

    Raises:
        UserError: with what to change; then no file was written.
    """
    source = Path(source)
    checkpoint = run_folder.tested_checkpoint(source) if source.is_dir() else source
    suffixes = (".pt2", ".onnx") if find_spec("onnxscript") else (".pt2",)
    stem = stem_of(checkpoint)
    paths = [Path(path) for path in outputs or (checkpoint.with_name(stem + s) for s in suffixes)]
    for path in paths:
        if path.suffix not in (".pt2", ".onnx") or (path.exists() and not force):
            raise UserError(f"{path} must end in .pt2 or .onnx; --force replaces one that exists.")
    module, inputs = first_call(*built(checkpoint, words, conf))
    network, names, first = Network(module), [*inputs], next(iter(inputs.values()))
    # A trace of one sample takes their number for a constant, and a forward may do so for others.
    batches = [
        tuple(tensor[torch.arange(num) % len(tensor)] for tensor in inputs.values())
        for num in (max(2, len(first)), 1, 3)
    ]
    rows = tuple({0: torch.export.Dim("batch")} for _ in names)
    with torch.no_grad(), ExitStack() as files:
        with refused(f"{type(module).__name__} cannot be exported"):
            program = torch.export.export(network, batches[0], dynamic_shapes=(rows,))
        program.example_inputs = None  # samples of the data would be in the file
        for path in paths:
            file = files.enter_context(replacing(path, is_forced=force))
            with refused(f"{path} was not written"):
                run = write(program, path.suffix, names, file)
            for batch in batches:
                with refused(f"{path} was not written, for a batch of {len(batch[0])} differs"):
                    compare(run(*batch), network(*batch))
    shapes = [
        f"{name} {t.dtype} (batch, {str([*t.shape[1:]])[1:-1]})" for name, t in inputs.items()
    ]
    lines = [f"{path}  {path.stat().st_size / 1e6:,.2f} MB; {'; '.join(shapes)}" for path in paths]
    return lines + ["no ONNX: pip install -e '.[onnx]'"] * (not outputs and len(suffixes) == 1)


def built(checkpoint: Path, words: Sequence[str], conf: str | Path) -> tuple[Any, Any]:
    """Return the module with its weights, and the data, as evaluate.py builds them."""
    own = [f"checkpoint={in_quotes(str(checkpoint))}", "strategy=cpu", "logger=none"]
    command = compose_command("evaluate", [*own, *words], conf)
    check(command)
    cfg: Any = OmegaConf.create(OmegaConf.to_container(command.cfg, resolve=True))
    with user_errors():
        check_targets(cfg)
        data = make_data(cfg)
    return load_model(cfg, checkpoint), data


def first_call(model: pl.LightningModule, data: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the network, and the inputs of its first call in a test by their names.

    Raises:
        UserError: if it is not called, or with something else than batches of tensors.
    """
    networks = [child for child in model.children() if any(True for _ in child.parameters())]
    module = model if is_overridden("forward", model) or len(networks) != 1 else networks[0]
    calls: list[dict[str, Any]] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        calls.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in bound.items()})

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    with user_errors(), catch_warnings():  # tensors of inference mode cannot be traced
        simplefilter("ignore")
        quick: Any = {"fast_dev_run": 1, "enable_progress_bar": False, "inference_mode": False}
        pl.Trainer(accelerator="cpu", devices=1, **quick).test(model, data, verbose=False)
    hook.remove()
    inputs = calls[0] if calls else {}
    if not inputs or not all(isinstance(v, Tensor) and v.ndim for v in inputs.values()):
        raise UserError(
            f"{type(model).__name__}.test_step must call self(...) with batches of tensors, each "
            f"an argument of its own; there is {', '.join(inputs) or 'no such call'}."
        )
    return module, inputs


def write(program: Any, suffix: str, names: list[str], file: BinaryIO) -> Any:
    """Write a traced network, read the file again, and return what computes with it."""
    if suffix == ".pt2":
        torch.export.save(program, file)
        file.flush()
        return torch.export.load(io.BytesIO(Path(file.name).read_bytes())).module()
    import onnxruntime

    made: Any = torch.onnx.export(program, input_names=names, dynamo=True, verbose=False)
    file.write(made.model_proto.SerializeToString())
    file.flush()
    session = onnxruntime.InferenceSession(file.name)
    return lambda *tensors: [
        torch.from_numpy(output)
        for output in session.run(None, dict(zip(names, (t.numpy() for t in tensors), strict=True)))
    ]


def compare(found: Any, expected: Any) -> None:
    """Raise an AssertionError with the difference where outputs are farther apart than rounding."""
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        close = CLOSE * float(other.double().nan_to_num(0, 0, 0).abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=close, equal_nan=True)


def leaves(value: Any) -> list[Tensor]:
    """Return the tensors of nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in leaves(part)]


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Turn whatever torch or a runtime raises into a UserError, without its other messages."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()) as noise, redirect_stderr(noise), catch_warnings():
            simplefilter("ignore")
            yield
    except Exception as error:
        line = read_error(error).user_line
        place = f" ({line})" if line else ""
        said = " ".join(str(error.__cause__ or error).split())[:300]
        raise UserError(f"{what}{place}: {said}") from error
    finally:
        logging.disable(logging.NOTSET)
