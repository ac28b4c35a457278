"""Write the network of a run as files that other programs run: torch.export's and ONNX."""

from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from torch import Tensor

from harness.checkpoints.lookup import verified
from harness.command import run_folder, validate
from harness.command.compose import compose_command, in_quotes
from harness.convert.checkpoint import stem_of
from harness.errors import UserError
from harness.export.calls import inside, observed, quiet
from harness.export.files import METHOD, WRITERS, Network, difference, traced
from harness.files import replacing
from harness.run.build import made_data, make
from harness.run.inputs import load_weights
from harness.run.mistakes import user_errors
from harness.run.provenance import tell_changes
from harness.run.targets import check_targets


def export(
    source: str | Path,
    outputs: Sequence[str | Path] = (),
    words: Sequence[str] = (),
    conf: str | Path = "conf",
    force: bool = False,
) -> list[str]:
    """Write the network of a run or checkpoint, and return a line for each file.

    Args:
        source: a run's folder, whose best checkpoint is taken, or a checkpoint in one.
        outputs: files that end in .pt2 or .onnx; by default both, beside the checkpoint.
        words: settings such as ``data.file=<path>``, as evaluate.py takes them.
        conf: the folder of the config files.
        force: replace files that exist.

    Raises:
        UserError: with what to change; then no file was written.
    """
    checkpoint = Path(source)
    if checkpoint.is_dir():
        checkpoint = run_folder.best_checkpoint(checkpoint)
    beside = [checkpoint.with_name(stem_of(checkpoint) + suffix) for suffix in WRITERS]
    paths = [Path(path) for path in outputs] or beside
    for path in paths:
        _check_output(path, force, is_named=bool(outputs))
    model, data = _built(checkpoint, words, conf)
    module, calls = observed(model, data)
    network = Network(module, METHOD if hasattr(module, METHOD) else "forward", calls[0]).eval()
    # Beside the real batches, sizes for which a trace is often wrong.
    batches = [call.resized(call.batch_size) for call in calls]
    batches += [calls[0].resized(num) for num in (1, 3)]
    names, lines = list(calls[0].inputs), []
    inputs = "; ".join(
        f"{name} {str(calls[0].inputs[name].dtype).removeprefix('torch.')} "
        f"({', '.join(map(str, shape))})"
        for name, shape in calls[0].shapes().items()
    )
    if baked := [f"{k}={v!r:.40}" for k, v in calls[0].constants.items() if v is not None]:
        inputs += f"; with {', '.join(baked)} for ever"
    with torch.no_grad(), ExitStack() as written:
        expected = [_computed(network, batch) for batch in batches]
        program = traced(network, calls[0])
        for path in paths:
            file = written.enter_context(replacing(path, is_forced=force))
            with quiet():
                run = WRITERS[path.suffix](program, names, file)
            found = difference(path, run, batches, expected)
            size = Path(file.name).stat().st_size / 1e6
            lines.append(f"{path}  {size:,.2f} MB, differs by {found:.1g} at most; {inputs}")
    return lines


def _computed(network: Network, batch: list[Tensor]) -> list[Tensor]:
    """What a network returns, in the order of its tensors.

    Raises:
        UserError: if it does not take a batch of another size.
    """
    try:
        return [*inside(network(*batch))]
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = ", ".join(str(tuple(one.shape)) for one in batch)
        said = str(error).strip().partition("\n")[0]
        raise UserError(
            f"forward does not take {shapes}: {said}. Inputs with as many rows as the batch are "
            "taken for samples: where one is not, use another data.batch_size."
        ) from error


def _check_output(path: Path, force: bool, is_named: bool) -> None:
    if path.suffix not in WRITERS:
        raise UserError(f"-o {path} must end in {' or '.join(WRITERS)}.")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is not a folder; create it first.")
    if path.is_dir() or (path.exists() and not force):
        raise UserError(f"{path} exists; --force replaces it, and -o <name> writes another.")
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if path.suffix == ".onnx" and missing:
        alone = "" if is_named else f" (or -o {path.with_suffix('.pt2')}, which needs none of them)"
        raise UserError(f"{path} needs {', '.join(missing)}: pip install -e .[onnx]{alone}.")


def _built(
    checkpoint: Path, words: Sequence[str], conf: str | Path
) -> tuple[pl.LightningModule, Any]:
    """The module with its weights, and the data, as a test of the checkpoint has them."""
    own = (f"checkpoint={in_quotes(str(checkpoint))}", "strategy=cpu", "logger=none")
    command = compose_command("evaluate", [*own, *words], conf)
    validate.check(command)
    cfg: Any = OmegaConf.create(OmegaConf.to_container(command.cfg, resolve=True))
    cfg.callbacks = {}
    if cfg.data is not None and "num_workers" in cfg.data:
        cfg.data.num_workers = 0
    pl.seed_everything(cfg.seed, verbose=False)
    with user_errors():
        check_targets(cfg)
        data = made_data(cfg)
        model = make(cfg.model)
        tell_changes(checkpoint)
        load_weights(model, verified(checkpoint))
    return model.eval(), data
