"""What was tried where memory ran out, what may fit, and what takes the most."""

import gc
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from harness.data.datamodule import DataModule
from harness.places import Raised, is_owners
from harness.watch.work import num_devices, peak_bytes

TEXTS = re.compile(
    "DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA out of memory|CUDA error: out of "
    "memory|STATUS_ALLOC_FAILED|Unable to allocate .* for an array"
)
ASKED = re.compile(r"(?:[Tt]ried to|Unable to) allocate ([\d.]+) (bytes|[KMGTP]iB)")
# Functions of Lightning that compute a batch, and what loads one.
TRAINING = {"training_step", "optimizer_step"}
IN_A_BATCH = TRAINING | {"validation_step", "test_step", "predict_step", "batch_to_device", "fetch"}
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
MOST_NAMED = 5
HELD = "; what a backward pass needs is held by autograd, and comes with the samples"
MEASURES = (
    "That is an estimate; `python scripts/tune.py batch-size` with the same words measures it. Or "
    "use trainer.precision=bf16-mixed."
)


def is_one(error: BaseException) -> bool:
    """Whether an allocation has failed, on a GPU or on a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(
        isinstance(error, RuntimeError) and TEXTS.search(str(error))
    )


def asked(error: BaseException) -> float:
    """The bytes that could not be had; 0 where the exception does not say."""
    found = ASKED.search(str(error))
    return float(found[1]) * UNITS[found[2]] if found else 0.0


def said(error: BaseException) -> str:
    """What has failed, without torch's advice for its authors."""
    num_bytes = asked(error)
    return f"out of memory{f', {mib(num_bytes)} were asked for' if num_bytes else ''}"


def answer(error: BaseException, found: Raised, trainer: pl.Trainer) -> str:
    """What to type instead, and the largest tensors, in some lines.

    Args:
        error: that ``is_one``; its traceback still holds what was computed.
        found: the same exception.
        trainer: whose run it has ended.
    """
    functions = {place.function for place in found.places}
    if not functions & IN_A_BATCH:
        return (
            "No batch was computed there: what is loaded at once does not fit, and a smaller batch "
            "does not help.\nLoad it in parts, or leave it on the disk: "
            'np.load(path, mmap_mode="r").'
        )
    lines = [advice(trainer, asked(error), bool(functions & TRAINING))]
    largest = sorted(tensors(found, trainer), key=lambda one: -one[1].nbytes)[:MOST_NAMED]
    largest = [(name, one) for name, one in largest if one.nbytes >= 2**20]
    named = [f"{name} {tuple(one.shape)}: {mib(one.nbytes)}" for name, one in largest]
    if named:
        lines.append(f"The largest tensors that Python holds: {', '.join(named)}{HELD}.")
    return "\n".join(lines)


def advice(trainer: pl.Trainer, num_bytes: float, is_training: bool) -> str:
    """A batch that may fit, for what could not be allocated; the trainer has ended by now."""
    data, module = getattr(trainer, "datamodule", None), trainer.lightning_module
    if not isinstance(data, DataModule):
        return _advice_for_loaders(trainer, is_training)
    parts = trainer.accumulate_grad_batches * trainer.world_size if is_training else 1
    tried = -(-data.batch_size // (parts * num_devices(trainer)))
    tried = min(tried, data.max_samples_per_device or tried)
    if tried == 1:
        return "Not even one sample fits: use a smaller model, or trainer.precision=bf16-mixed."
    fits = estimate(tried, num_bytes, free_bytes(trainer), peak_bytes(trainer) - fixed(trainer))
    said, advised = f"{tried} samples at once did not fit on a device.", f"{fits} may:"
    if module.automatic_optimization:
        advised += f" data.max_samples_per_device={fits} takes the same steps in parts."
    else:
        advised += f" data.batch_size={fits * num_devices(trainer) * trainer.world_size}."
    return f"{said} {advised}\n{MEASURES}"


def _advice_for_loaders(trainer: pl.Trainer, is_training: bool) -> str:
    """What to type where the owner's code makes the loaders, and nothing can be estimated."""
    num = 2 * trainer.accumulate_grad_batches
    less = "Use a smaller batch"
    if is_training and trainer.lightning_module.automatic_optimization:
        less = f"trainer.accumulate_grad_batches={num} takes the same steps in smaller parts"
    return f"{less}. Or use trainer.precision=bf16-mixed."


def estimate(tried: int, num_bytes: float, free: float, used: float) -> int:
    """A power of two of samples, at most half of what was tried.

    What samples take grows with their number: at the failure ``used`` and ``num_bytes`` more, and
    there is room for ``used`` and ``free``. As more may have been to come, such as the backward
    pass, it is half of what this gives, and a quarter where the failure came early.

    Args:
        tried: samples.
        num_bytes: that could not be had.
        free: bytes that were left.
        used: bytes, but for what does not depend on samples.
    """
    used = max(used, 0.0)
    share = min(1.0, (used + free) / (used + num_bytes)) if num_bytes else 1.0
    fits = tried * share / (4 if used < num_bytes else 2)
    return int(2 ** max(0, int(fits).bit_length() - 1))


def fixed(trainer: pl.Trainer) -> float:
    """Bytes of parameters, of their gradients, and of the optimizers' states."""
    states = [state for one in trainer.optimizers for state in one.state.values()]
    values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    parameters = [*trainer.lightning_module.parameters()]
    trained = [one for one in parameters if one.requires_grad]
    return float(sum(one.nbytes for one in [*parameters, *trained, *values]))


def free_bytes(trainer: pl.Trainer) -> float:
    """What the device, the system and the process's limit leave."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    found = []
    with suppress(OSError, AttributeError, IndexError, TypeError):  # Linux has these files
        text = Path("/proc/meminfo").read_text()
        found.append(int(re.findall(r"MemAvailable:\s+(\d+)", text)[0]) * 1024)
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            found.append(limit - pages * resource.getpagesize())
    return float(max(0, min(found, default=0)))


def tensors(found: Raised, trainer: pl.Trainer) -> Iterator[tuple[str, Tensor]]:
    """All tensors that Python holds, each once, by the best name that there is for it."""
    seen: set[int] = set()
    for name, tensor in named_tensors(found, trainer):
        with suppress(RuntimeError):  # it has no storage
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor


def named_tensors(found: Raised, trainer: pl.Trainer) -> Iterator[tuple[str, Tensor]]:
    """See ``tensors``; some more than once."""
    names: dict[Tensor, str] = {}
    for name, parameter in trainer.lightning_module.named_parameters():
        names[parameter] = name
        yield name, parameter
        if parameter.grad is not None:
            yield f"the gradient of {name}", parameter.grad
    for optimizer in trainer.optimizers:
        for of, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{type(optimizer).__name__}'s {key} of {names.get(of)}", value
    # The owner's own names come before those of the libraries that were called.
    for place in sorted(found.places, key=lambda place: not is_owners(place.file)):
        for name, value in (place.frame.f_locals if place.frame else {}).items():
            for tensor in inside(value, 100):
                yield f"{name} in {place.function}", tensor
    for one in gc.get_objects():
        if issubclass(type(one), Tensor):
            yield "one without a name", one


def inside(value: Any, most: int | None = None) -> Iterator[Tensor]:
    """The tensors of a batch, or of what else a variable may hold; of its first parts alone."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in [*(value.values() if isinstance(value, Mapping) else value)][:most]:
            yield from inside(part, most)


def mib(num_bytes: float) -> str:
    """Bytes as a person reads them."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
