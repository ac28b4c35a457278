"""What mends a mistake that torch, Lightning or the system report, and what the step was given."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from harness.places import Raised, is_owners


class Hint(NamedTuple):
    """A frequent mistake.

    Attributes:
        pattern: of the message.
        mends: a sentence for the owner.
        method: of the owner, which has made the mistake; it is named where the exception has passed
            through none of the owner's lines.
    """

    pattern: str
    mends: str
    method: str = ""


OUT_OF_MEMORY = (
    "CUDA out of memory|CUDA error: out of memory|STATUS_ALLOC_FAILED"
    "|DefaultCPUAllocator: (can't allocate|not enough) memory"
)
NO_SHARED_MEMORY = (
    "Data workers pass batches by /dev/shm, which has no room: use data.num_workers=0, or give it "
    "more, as with docker run --shm-size=8g."
)
STEP, ITEM = "training_step", "__getitem__"
HINTS = [
    Hint(r"device-side assert", "Most often a label or an index is out of range; a GPU notices it "
         "later, at another line. strategy=cpu names the line.", STEP),
    Hint(OUT_OF_MEMORY, "data.max_samples_per_device=<n> takes the same step in parts; so does a "
         "smaller batch with trainer.accumulate_grad_batches=2 where the loaders are your own. "
         "Less memory: a smaller data.batch_size, trainer.precision=bf16-mixed.", STEP),
    Hint(r"does not require grad", "The loss that is returned must come from trained parameters, "
         "without detach, item or no_grad. A validation or test that takes gradients itself needs "
         "+trainer.inference_mode=false.", STEP),
    Hint(r"implicitly created only for scalar|a loss of shape", "The loss that is returned must be "
         "one number: take its mean.", STEP),
    Hint(r"not used in producing|finished reduction in the prior iteration", "Some parameters have "
         "no part in the loss: use or freeze them, or, as for the two networks of a GAN, set "
         "trainer.strategy.find_unused_parameters=true.", STEP),
    Hint(r"Expected more than 1 value per channel", "BatchNorm got a share of one sample: leave "
         "out small batches (drop_last=True), use fewer devices, or trainer.sync_batchnorm=true "
         "under ddp.", STEP),
    Hint(r"modified by an inplace operation", "What backward needs was changed in place after it "
         "was used: give the loss a copy (self.queue.clone()), or change it in "
         "on_train_batch_end.", STEP),
    Hint(r"returning None in distributed training", "Every process must return a loss: one without "
         "samples that count returns a loss of zero, such as 0.0 * loss.", STEP),
    Hint(r"mark a variable ready only once", "A parameter got its gradient in parts, most often by "
         "reentrant checkpointing: write torch.utils.checkpoint.checkpoint(..., "
         "use_reentrant=False).", STEP),
    Hint(r"twice in `\w+` with different arguments", "A key is logged once in a step; of several "
         "loaders each needs its own: leave out add_dataloader_idx=False.", "validation_step"),
    Hint(r"stack expects each tensor to be equal size|each element in list of batch",
         "The samples of a batch differ in shape: pad or crop them, or override collate.", ITEM),
    Hint(r"batch must contain tensors|NoneType' has no len",
         "A sample must be made of tensors or numbers.", ITEM),
    Hint(r"returned `None`, this fit will run with no optimizer", "Return the optimizer; a module "
         "that trains nothing sets automatic_optimization = False and returns [].",
         "configure_optimizers"),
    Hint(r"[Cc]an't pickle|[Cc]annot pickle", "Other processes get it by pickle: define functions "
         "and classes at the top of a file.", "__init__"),
    Hint(r"Unable to allocate .* for an array", "What is loaded at once does not fit: load it in "
         'parts, or leave it on the disk: np.load(path, mmap_mode="r").'),
    Hint(r"shared memory", NO_SHARED_MEMORY),
    Hint(r"DataLoader worker \(pid.*(exited unexpectedly|killed by signal: Killed)", "A data "
         "worker has ended, most often for want of memory, or of room in /dev/shm (docker run "
         "--shm-size=8g gives more): use fewer data.num_workers, or 0, or samples that take less."),
    Hint(r"on the same device", "Make tensors on self.device, or register them as buffers."),
]  # fmt: skip
NO_PREDICT_STEP = (
    "{name} has no predict_step, and its forward does not take the batch as it is. "
    "Write in {name}: def predict_step(self, batch, batch_idx): return self(...)"
)


def hint_for(message: str) -> Hint | None:
    """The hint for a message; the first that fits."""
    return next((hint for hint in HINTS if re.search(hint.pattern, message)), None)


def shortened(message: str) -> str:
    """Leave out of a message what its library advises for settings of its own."""
    if not re.search(OUT_OF_MEMORY, message):
        return message.partition(". ")[0]
    size = re.search(r"allocate ([\d.]+ \w+)", message)
    return "out of memory" + (f", {size[1]} were asked for" if size else "")


def given(error: Raised) -> str:
    """What the owner's innermost step was given, and what its labels were compared with."""
    parts = []
    for place in reversed(error.places):
        if place.frame is None:
            continue
        values, arguments = place.frame.f_locals, place.frame.f_code.co_varnames
        if place.function == "cross_entropy" and "out of bounds" in error.message:
            parts.append(f"The network knows {values['input'].shape[1]} classes.")
        elif len(arguments) > 1 and arguments[1] in values:
            if place.function.endswith("_step") and (
                is_owners(place.file) or place.function == "predict_step"  # or Lightning's own
            ):
                return " ".join([*parts, f"The batch: {described(values[arguments[1]])}."])
            if place.function == ITEM and is_owners(place.file):
                return f"Sample {values[arguments[1]]!s:.50}."
    return " ".join(parts)


def described(value: Any) -> str:
    """Shapes, kinds and ranges of the tensors of a batch, within some 200 characters."""
    if isinstance(value, Tensor):
        text = f"tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if not (value.dtype.is_floating_point or value.dtype.is_complex) and value.numel():
            with suppress(RuntimeError):  # a GPU that has failed answers no more
                text += f" from {value.min().item()} to {value.max().item()}"
        return text
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {described(part)}" for key, part in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = ", ".join(map(described, value[:8])) + ", ..." * (len(value) > 8)
    else:
        text = type(value).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."
