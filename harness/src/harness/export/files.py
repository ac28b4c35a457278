"""A traced network as files, each held against the network before it gets its name."""

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor, nn

from harness.errors import UserError
from harness.export.calls import Call, inside, quiet
from harness.places import raised

CLOSE = 1e-4  # differences that rounding explains, in parts of the network's largest output
FIXED = "Forward may squeeze it, or take it for a constant."
METHOD = "exported"  # of a module that gives other programs something else than forward does
Runner: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor]]


class Network(nn.Module):
    """One method of a module, with its tensors as arguments by position.

    Args:
        module: in evaluation mode.
        method: its name.
        call: the names of the tensors, and the other arguments.
    """

    def __init__(self, module: nn.Module, method: str, call: Call) -> None:
        super().__init__()
        self.module, self.method = module, method
        self.names, self.constants = tuple(call.inputs), call.constants

    def forward(self, *tensors: Tensor) -> Any:
        """What the method returns."""
        named = dict(zip(self.names, tensors, strict=True))
        return getattr(self.module, self.method)(**named, **self.constants)


def traced(network: Network, call: Call) -> torch.export.ExportedProgram:
    """What torch.export makes of a network, for any batch size.

    Raises:
        UserError: if it cannot.
    """
    # A batch of one would be traced as one that is always of one.
    inputs = tuple(call.resized(max(2, call.batch_size)))
    batch = torch.export.Dim("batch")
    dynamic = [{0: batch} if shape[:1] == ("batch",) else {} for shape in call.shapes().values()]
    try:
        with quiet():
            program = torch.export.export(network, inputs, dynamic_shapes=(tuple(dynamic),))
    except UserError:
        raise
    except Exception as error:  # whatever a forward does that cannot be traced
        found, text = raised(error), str(error)
        place = f" ({found.owners})" if found.owners else ""
        if "data-dependent" in text:
            why = "it decides by the numbers of its input; torch.where takes from two results"
        elif "Constraints violated" in text:
            why = (
                "in it, or in a network that it calls, the size of a batch is a constant; write "
                "x.shape[0] or -1 for it, and no loop over samples"
            )
        else:
            why = f"{found.kind}: {text.partition(chr(10))[0].rstrip('.')}"
        own = "" if network.method == METHOD else f" Or write {METHOD}, which is taken instead."
        raise UserError(
            f"{type(network.module).__name__}.{network.method} cannot be exported{place}: "
            f"{why}.{own}"
        ) from error
    program.example_inputs = None  # samples of the data would be in the file
    return program


def _write_pt2(
    program: torch.export.ExportedProgram, names: Sequence[str], file: BinaryIO
) -> Runner:
    """Write torch.export's own file, and return what it computes."""
    torch.export.save(program, file)
    module = torch.export.load(_read_again(file)).module()
    return lambda batch: [*inside(module(*batch))]


def _write_onnx(
    program: torch.export.ExportedProgram, names: Sequence[str], file: BinaryIO
) -> Runner:
    """Write one file of ONNX, and return what onnxruntime computes with it.

    Raises:
        UserError: if ONNX has no word for something.
    """
    import onnxruntime

    try:
        made = torch.onnx.export(program, input_names=[*names], dynamo=True, verbose=False)
        assert made is not None
        file.write(made.model_proto.SerializeToString())
    except Exception as error:  # of the converter, or of protobuf
        text = str(error.__cause__ or error)
        operator = re.search(r"target=torch\.ops\.([\w.]+)\]", text)
        what = f"ONNX has no {operator[1]}" if operator else text.strip().partition("\n")[0]
        raise UserError(
            f"ONNX cannot be written: {what}. Let forward do without, or write torch.export's "
            "file alone with -o <name>.pt2."
        ) from error
    session = onnxruntime.InferenceSession(_read_again(file).getvalue())
    return lambda batch: [
        torch.from_numpy(output)
        for output in session.run(
            None, {name: t.numpy() for name, t in zip(names, batch, strict=True)}
        )
    ]


WRITERS = {".pt2": _write_pt2, ".onnx": _write_onnx}


def _read_again(file: BinaryIO) -> io.BytesIO:
    """What was written to a file, from the disk."""
    file.flush()
    return io.BytesIO(Path(file.name).read_bytes())


def difference(
    path: Path, run: Runner, batches: Sequence[list[Tensor]], expected: Sequence[list[Tensor]]
) -> float:
    """How far a file is at most from the network.

    Raises:
        UserError: farther than rounding explains, or not for every batch size.
    """
    largest, farthest = dict[int, float](), dict[int, float]()  # of each output
    for batch, outputs in zip(batches, expected, strict=True):
        size = next(len(tensor) for tensor in batch if tensor.ndim)
        try:
            with quiet():
                found = run(batch)
        except Exception as error:  # of a runtime
            said = str(error).strip().partition("\n")[0]
            raise UserError(
                f"{path} was not written: it refuses a batch of {size} ({said}). {FIXED}"
            ) from error
        if [t.shape for t in found] != [t.shape for t in outputs]:
            raise UserError(
                f"{path} was not written: with a batch of {size} its outputs have the shapes "
                f"{[tuple(t.shape) for t in found]}, and not {[tuple(t.shape) for t in outputs]}. "
                f"{FIXED}"
            )
        for i, (mine, theirs) in enumerate(zip(found, outputs, strict=True)):
            mine, theirs = mine.double(), theirs.double()
            is_same = (mine == theirs) | (mine.isnan() & theirs.isnan())
            away = torch.where(is_same, 0.0, (mine - theirs).abs()).nan_to_num(torch.inf)
            farthest[i] = max(farthest.get(i, 0.0), _largest(away))
            largest[i] = max(largest.get(i, 0.0), _largest(theirs[theirs.isfinite()].abs()))
    for i, far in farthest.items():
        if far > CLOSE * largest[i]:
            raise UserError(
                f"{path} was not written: it differs from the network by {far:.1g} in output {i}, "
                f"whose largest number is {largest[i]:.1g}. Does forward draw random numbers?"
            )
    return max(farthest.values(), default=0.0)


def _largest(tensor: Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0
