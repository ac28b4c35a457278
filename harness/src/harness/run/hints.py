"""Hints for frequent mistakes, by the message of torch, Lightning or the system."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from harness.run.stack import ErrorInfo

OUT_OF_MEMORY = (
    "CUDA out of memory|CUDA error: out of memory|STATUS_ALLOC_FAILED"
    "|DefaultCPUAllocator: (can't allocate|not enough) memory"
)
# torch raises it from a signal's handler, in whichever line runs at that moment.
WORKER_KILLED = r"DataLoader worker \(pid.*(exited unexpectedly|killed by signal)"
SHARED_MEMORY = r"shared memory|No space left on device: '/dev/shm"
MAX_TEXT = 200  # characters that describe a batch
HINTS = {
    r"device-side assert": "Most often a label or an index is out of range; a GPU notices it later,"
        " at another line. strategy=cpu names the line.",
    r"Target -?\d+ is out of bounds": "A label must be smaller than the network's number of "
        "outputs, and not negative.",
    OUT_OF_MEMORY: "data.max_samples_per_device=<n> takes the same step in parts; so does a smaller"
        " batch with trainer.accumulate_grad_batches=2 where the loaders are your own. Less memory:"
        " a smaller data.batch_size, trainer.precision=bf16-mixed.",
    r"does not require grad": "The loss that training_step returns must come from trained "
        "parameters, without detach, item or no_grad. A validation or test that takes gradients "
        "itself needs +trainer.inference_mode=false.",
    r"implicitly created only for scalar|a loss of shape": "The loss that training_step returns "
        "must be one number: take its mean.",
    r"not used in producing|finished reduction in the prior iteration": "Some parameters have no "
        "part in the loss: use or freeze them, or, as for the two networks of a GAN, set "
        "trainer.strategy.find_unused_parameters=true.",
    r"Expected more than 1 value per channel": "BatchNorm got a share of one sample: leave out "
        "small batches (drop_last=True), use fewer devices, or trainer.sync_batchnorm=true under "
        "ddp.",
    r"stack expects each tensor to be equal size|each element in list of batch": "The samples of a "
        "batch differ in shape: pad or crop them in __getitem__, or override collate.",
    r"batch must contain tensors|NoneType' has no len": "__getitem__ of the data set must return "
        "tensors or numbers.",
    r"returned `None`, this fit will run with no optimizer": "Return the optimizer; a module that "
        "trains nothing sets automatic_optimization = False and returns [].",
    r"[Cc]an't pickle|[Cc]annot pickle": "Other processes get it by pickle: define functions and "
        "classes at the top of a file.",
    SHARED_MEMORY: "Data workers pass batches by /dev/shm, which has no room: use "
        "data.num_workers=0, or give it more, as with docker run --shm-size=8g.",
    WORKER_KILLED: "A data worker has ended, most often for want of memory, or of room in /dev/shm "
        "(docker run --shm-size=8g gives more): use fewer data.num_workers, or 0, or samples that "
        "take less.",
    r"on the same device": "Make tensors on self.device, or register them as buffers.",
}  # fmt: skip
NO_PREDICT_STEP = (
    "Without a predict_step Lightning calls forward with the whole batch. Write in the module: "
    "def predict_step(self, batch, batch_idx): return self(...)"
)


def hint_for(error: ErrorInfo) -> str:
    """Return the first hint that fits an error, or an empty text."""
    for pattern, hint in HINTS.items():
        if re.search(pattern, error.message):
            return hint
    uses_forward = any(
        line.function == "predict_step" and "pytorch_lightning" in line.file for line in error.lines
    )
    return NO_PREDICT_STEP if uses_forward else ""


def short_message(message: str) -> str:
    """Leave out of a message with a hint what its library advises."""
    if not re.search(OUT_OF_MEMORY, message):
        return message.partition(". ")[0]
    size = re.search(r"allocate ([\d.]+ \w+)", message)
    return "out of memory" + (f", {size[1]} were asked for" if size else "")


def given(error: ErrorInfo) -> str:
    """Describe the batch that the innermost step got, or name the sample that was read."""
    for line in reversed(error.lines):
        if line.frame is None or not (line.is_users or line.function == "predict_step"):
            continue
        values, names = line.frame.f_locals, line.frame.f_code.co_varnames
        argument = values.get(names[1]) if len(names) > 1 else None
        if line.function.endswith("_step") and argument is not None:
            return f"The batch: {described(argument)}."
        if line.function == "__getitem__":
            return f"Sample {argument!s:.50}."
    return ""


def described(value: Any) -> str:
    """Describe the tensors of a batch by shape, kind and range."""
    if isinstance(value, Tensor):
        text = f"tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if not (value.dtype.is_floating_point or value.dtype.is_complex) and value.numel():
            with suppress(RuntimeError):  # a GPU after a failed kernel
                text += f" from {value.min().item()} to {value.max().item()}"
        return text
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {described(part)}" for key, part in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = ", ".join(map(described, value[:8])) + ", ..." * (len(value) > 8)
    else:
        text = type(value).__name__
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
