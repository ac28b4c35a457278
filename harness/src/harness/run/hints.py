"""What mends a mistake, and what a person would print first to find it."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from harness.places import Raised, is_owners

NO_SHARED_MEMORY = (
    "Data workers pass batches by /dev/shm, which has no room: use data.num_workers=0, or give it "
    "more, as with docker run --shm-size=8g."
)
OUT_OF_MEMORY = (
    "CUDA out of memory|CUDA error: out of memory|STATUS_ALLOC_FAILED"
    "|DefaultCPUAllocator: (can't allocate|not enough) memory"
)
# What torch says of a mistake and what mends it, by the owner's method that has made the mistake,
# which is told where the exception has passed through none of the owner's lines.
KNOWN = {
    "training_step": {
        r"device-side assert": "Most often a label or an index is out of range; a GPU notices it "
        "later, at another line. strategy=cpu names the line.",
        OUT_OF_MEMORY: "data.max_samples_per_device=<n> takes the same step in parts; so does a "
        "smaller batch with trainer.accumulate_grad_batches=2 where the loaders are your own. Less "
        "memory: a smaller data.batch_size, trainer.precision=bf16-mixed.",
        r"does not require grad": "The loss that is returned must come from trained parameters, "
        "without detach, item or no_grad. A validation or test that takes gradients itself needs "
        "+trainer.inference_mode=false.",
        r"implicitly created only for scalar": "The loss that is returned must be one number: "
        "take its mean.",
        r"not used in producing|finished reduction in the prior iteration": "Some parameters have "
        "no part in the loss: use or freeze them, or, as for the two networks of a GAN, set "
        "trainer.strategy.find_unused_parameters=true.",
        r"Expected more than 1 value per channel": "BatchNorm got a share of one sample: leave out "
        "small batches (drop_last=True), use fewer devices, or trainer.sync_batchnorm=true under "
        "ddp.",
        r"modified by an inplace operation": "What backward needs was changed in place after it "
        "was used: give the loss a copy (self.queue.clone()), or change it in on_train_batch_end.",
        r"returning None in distributed training": "Every process must return a loss: one without "
        "samples that count returns a loss of zero, such as 0.0 * loss.",
        r"mark a variable ready only once": "A parameter got its gradient in parts, most often by "
        "reentrant checkpointing: write torch.utils.checkpoint.checkpoint(..., "
        "use_reentrant=False).",
    },
    "validation_step": {
        r"twice in `\w+` with different arguments": "A key is logged once in a step; of several "
        "loaders each needs its own: leave out add_dataloader_idx=False.",
    },
    "__getitem__": {
        r"stack expects each tensor to be equal size|each element in list of batch": "The samples "
        "of a batch differ in shape: pad or crop them, or override collate.",
        r"batch must contain tensors|NoneType' has no len": "A sample must be made of tensors or "
        "numbers.",
    },
    "configure_optimizers": {
        r"returned `None`, this fit will run with no optimizer": "Return the optimizer; a module "
        "that trains nothing sets automatic_optimization = False and returns [].",
    },
    "__init__": {
        r"[Cc]an't pickle|[Cc]annot pickle": "Other processes get it by pickle: define functions "
        "and classes at the top of a file.",
    },
    "": {
        r"Unable to allocate .* for an array": "What is loaded at once does not fit: load it in "
        'parts, or leave it on the disk: np.load(path, mmap_mode="r").',
        r"shared memory": NO_SHARED_MEMORY,
        r"DataLoader worker \(pid.*(exited unexpectedly|killed by signal: Killed)": "A data worker "
        "has ended, most often for want of memory, or of room in /dev/shm (docker run "
        "--shm-size=8g gives more): use fewer data.num_workers, or 0, or samples that take less.",
        r"on the same device": "Make tensors on self.device, or register them as buffers.",
    },
}


def brief(message: str) -> str:
    """Leave out of a message what its library advises for settings of its own."""
    if not re.search(OUT_OF_MEMORY, message):
        return message.partition(". ")[0]
    asked = re.search(r"allocate ([\d.]+ \w+)", message)
    return "out of memory" + (f", {asked[1]} were asked for" if asked else "")


def seen(found: Raised) -> str:
    """What the innermost step was given, and what its labels were compared with."""
    said = []
    for place in reversed(found.places):
        if place.frame is None:
            continue
        names, arguments = place.frame.f_locals, place.frame.f_code.co_varnames
        if place.function == "cross_entropy" and "out of bounds" in found.message:
            said.append(f"The network knows {names['input'].shape[1]} classes.")
        elif is_owners(place.file) and len(arguments) > 1 and arguments[1] in names:
            if place.function.endswith("_step"):
                return " ".join([*said, f"The batch: {described(names[arguments[1]])}."])
            if place.function == "__getitem__":
                return f"Sample {names[arguments[1]]!s:.50}."
    return " ".join(said)


def described(value: Any) -> str:
    """Shapes, kinds and ranges of the tensors of a batch, within some 200 characters."""
    if isinstance(value, Tensor):
        text = f"tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        is_whole = not value.dtype.is_floating_point and not value.dtype.is_complex
        if is_whole and value.numel():
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
