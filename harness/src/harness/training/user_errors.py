"""Describe a mistake in a run's settings, or in the user's code, in one to three lines.

In: an exception. Out: the message that ``build`` raises as a ``UserError`` or that ``command.main``
prints. The message names the innermost line of the user's code or of a public package, the
exception, and one hint. A bug of the library keeps its traceback. Only a run that fails imports
this file.
"""

import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from hydra.errors import InstantiationException
from hydra.utils import get_object
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError

from harness.display import display_path
from harness.errors import TrainingError, UserError
from harness.failed_imports import cure_of_import, installed_package, missing_module
from harness.files import LIBRARY
from harness.monitoring.objective import missing_objective
from harness.suggestions import suggest
from harness.targets import targets
from harness.training import log_file
from harness.training.optimizer_states import describe_misfit

STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
LIGHTNING = ("pytorch_lightning", "lightning_fabric")  # their own errors are about the user's code
# The library calls these packages, itself or through Lightning. An error that one of them raises
# may therefore be a bug of the library.
CALLED_PACKAGES = (
    *("torch", "torchmetrics", "lightning_utilities", "hydra", "omegaconf", "yaml", "numpy"),
    *("polars", "sklearn", "PIL", "rich", "matplotlib", "tensorboard", "packaging", "fsspec"),
    *("optuna", "pynvml", "onnx", "onnxruntime", "onnxscript"),
)
MAX_LENGTH = 300  # characters of a message: two lines of a screen
SHOWS_TRACEBACK = "HYDRA_FULL_ERROR=1 prints the traceback."
# Lightning raises this while it cleans up after loaders that failed to start.
CLEAN_UP_ERROR = "Please call `iter(combined_loader)` first"
# A data worker and a dp replica send their exception as the text of a traceback. Lines of code in
# that text are indented, and the message is not.
FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
MESSAGE = re.compile(r"^([\w.]+)(?:: (.*))?", re.MULTILINE | re.DOTALL)
OUT_OF_MEMORY = (
    "CUDA out of memory|CUDA error: out of memory|STATUS_ALLOC_FAILED"
    "|DefaultCPUAllocator: (can't allocate|not enough) memory"
)
READS_SAMPLES = "torch/utils/data/_utils/"  # calls the user's __getitem__ and collate
WORKER_KILLED = r"DataLoader worker \(pid.*(exited unexpectedly|killed by signal)"
# torch raises these errors at any line, so the message names no line.
RAISED_AT_ANY_LINE = rf"shared memory|No space left on device: '/dev/shm|{WORKER_KILLED}"
HINTS = {  # by the pattern of a message of torch or Lightning
    r"device-side assert": "Most often a label or an index is out of range. The GPU reports it "
        "late, at another line. Use strategy=cpu to see the line.",
    r"Target -?\d+ is out of bounds": "A label must be smaller than the network's number of "
        "outputs, and not negative.",
    OUT_OF_MEMORY: "data.max_samples_per_device=<n> computes the same step in smaller batches. So "
        "does half the batch size with trainer.accumulate_grad_batches=2. "
        "trainer.precision=bf16-mixed needs less memory.",
    r"does not require grad": "Compute the loss that training_step returns from trained "
        "parameters, without detach, item or no_grad. If validation or test computes gradients, "
        "set +trainer.inference_mode=false.",
    r"implicitly created only for scalar|a loss of shape": "The loss that training_step returns "
        "must be one number: take its mean.",
    r"not used in producing|finished reduction in the prior iteration": "The loss does not depend "
        "on some parameters. Use them, freeze them, or set "
        "trainer.strategy.find_unused_parameters=true.",
    r"mark a variable ready only once": "Pass use_reentrant=False to activation checkpointing. For "
        "another package's network, set +trainer.strategy.static_graph=true.",
    r"modified by an inplace operation": "An operation such as += changes a tensor that backward "
        "needs. Set +trainer.detect_anomaly=true to see its line.",
    r"backward through the graph a second time": "A tensor that is kept from an earlier step needs "
        "detach(). Two calls of backward in one step need retain_graph=True in the first.",
    r"Tried to step \d+ times": "The schedule is shorter than the training. Give it "
        "total_steps=self.trainer.estimated_stepping_batches.",
    r"Expected more than 1 value per channel": "BatchNorm got one sample. Leave out small batches "
        "(drop_last=True), use fewer devices, or set trainer.sync_batchnorm=true under ddp.",
    r"stack expects each tensor to be|each element in list of batch|batch must contain tensors":
        "__getitem__ must return numbers, or tensors of one shape: pad or crop them there, or "
        "override collate.",
    r"returned `None`, this fit will run with no optimizer": "Return the optimizer. In a module "
        "that trains nothing, set automatic_optimization = False and return [].",
    r"on the same device": "Make tensors on self.device, or register them as buffers.",
    RAISED_AT_ANY_LINE: "A data worker has ended, most often because the memory or /dev/shm is "
        "full. Use fewer data.num_workers, or 0. In a container, use docker run --shm-size=8g.",
}  # fmt: skip

TRAINER_HINTS = {  # by the pattern of the Trainer's message that the hint replaces
    r"more than one stateful callback of type `(\w+)`": "callbacks: two of class {} have the same "
        "monitor, mode and interval, so Lightning cannot save the state of both.\nGive one of "
        "them another monitor, or leave it out. To keep several checkpoints of one monitor, use "
        "callbacks=top_k callbacks.checkpoint.save_top_k=<number>.",
    r"added multiple (progress bar) callbacks": "callbacks: the config has more than one {}.\n"
        "Keep one of them, or none with trainer.enable_progress_bar=false.",
}  # fmt: skip


class ErrorInfo(NamedTuple):
    """The class and the message of an exception, and the lines of its traceback."""

    class_name: str
    message: str  # on one line
    lines: list[traceback.FrameSummary]  # from the outermost call to the line that raised it

    @property
    def user_line(self) -> str:
        """Return the innermost line of the user's code that the library called, or "".

        The lines of a program or a test that calls the library are left out.
        """
        is_library = [LIBRARY in Path(line.filename).parents for line in self.lines]
        called = self.lines[is_library.index(True) if any(is_library) else 0 :]
        line = next((line for line in reversed(called) if is_user_code(line.filename)), None)
        return "" if line is None else format_line(display_path(line.filename), line)

    @property
    def package_line(self) -> str:
        """Return the line of a public package that raised the error, or called torch; else ""."""
        for line in reversed(self.lines):
            path = Path(line.filename).resolve()
            site_packages, package = installed_package(path)
            if package and package not in (*CALLED_PACKAGES, *LIGHTNING, "lightning", "harness"):
                return format_line(str(path.relative_to(site_packages)), line)
            if package not in CALLED_PACKAGES and STDLIB not in path.parents:
                return ""
        return ""

    @property
    def is_called_by_lightning(self) -> bool:
        """Return whether Lightning or a data loader, not this library, made the failing call."""
        for line in reversed(self.lines):
            path = Path(line.filename).resolve()
            _, package = installed_package(path)
            if package not in CALLED_PACKAGES and (package or STDLIB not in path.parents):
                return package in LIGHTNING
            if READS_SAMPLES in path.as_posix():
                return True
        return False

    @property
    def headline(self) -> str:
        """Return the user's or the package's line if there is one, the class and the message."""
        line = self.user_line or self.package_line
        return ": ".join(filter(None, [line, self.class_name, self.message]))


def format_line(path: str, line: traceback.FrameSummary) -> str:
    """Return the file, the number and the function of a line."""
    where = f"{path}:{line.lineno}"
    return where if line.name == "<module>" else f"{where} in {line.name}"


def is_user_code(file: str) -> bool:
    """Return whether a file is the user's: not Python's, this library's, installed or compiled."""
    path = Path(file).resolve()
    is_others = any(part.endswith("-packages") or "torchinductor" in part for part in path.parts)
    return not is_others and not {LIBRARY, STDLIB} & {*path.parents} and path.is_file()


def read_error(error: BaseException) -> ErrorInfo:
    """Return the `ErrorInfo` of an exception, or of a data worker's exception that it quotes."""
    class_name, text = type(error).__name__, str(error)
    frames = list(FRAME.finditer(text))
    if isinstance(error, SyntaxError) and error.filename:
        line = traceback.FrameSummary(error.filename, error.lineno, "<module>")
        return ErrorInfo(class_name, error.msg, [line])
    if frames and (match := MESSAGE.search(text, frames[-1].end())):
        lines = [traceback.FrameSummary(frame[1], int(frame[2]), frame[3]) for frame in frames]
        return ErrorInfo(match[1].rpartition(".")[2], one_line(match[2] or ""), lines)
    return ErrorInfo(class_name, one_line(text), [*traceback.extract_tb(error.__traceback__)])


def one_line(text: str) -> str:
    """Return a text without line breaks, at most ``MAX_LENGTH`` characters and "..."."""
    if text.startswith("CUDA error"):
        text = text.partition("\n")[0]  # general advice follows
    text = " ".join(text.split())
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}..."


def describe_user_error(error: BaseException) -> str | None:
    """Describe a mistake in the user's code in one to three lines, and log its traceback.

    Returns:
        ``None`` for any other error: the traceback has no line of the user or of a public package,
        Lightning did not raise it, and no hint fits.
    """
    error = _hidden_cause(error)
    info = read_error(error)
    hint = next((HINTS[pattern] for pattern in HINTS if re.search(pattern, info.message)), "")
    hint = hint or cure_of_import(error) or missing_module(info.message)
    is_mistake = hint or info.user_line or info.package_line or info.is_called_by_lightning
    if isinstance(error, TrainingError) or not is_mistake:
        return None
    if re.search(RAISED_AT_ANY_LINE, info.message):
        info = info._replace(lines=[])
    elif worker := re.search(r"in DataLoader worker process (\d+)", str(error)):
        hint += f" Data worker {worker[1]} raised it. Use data.num_workers=0 to debug it."
    if re.search(OUT_OF_MEMORY, info.message):
        info = info._replace(message="out of memory")
    elif hint:  # replaces the advice in torch's or Lightning's own message
        info = info._replace(message=info.message.partition(". ")[0])
    path = log_file.write_traceback(error)
    where = f"The traceback is in {path} (HYDRA_FULL_ERROR=1 prints it)." if path else ""
    texts = [info.headline, hint.strip(), where or SHOWS_TRACEBACK]
    return "\n".join(filter(None, texts))


def _hidden_cause(error: BaseException) -> BaseException:
    """Return the exception behind a failed clean-up of Lightning or of a loader, else the error."""
    hidden: BaseException | None = error
    while hidden is not None and not re.search(WORKER_KILLED, str(hidden)):
        hidden = hidden.__context__
    if hidden is None and CLEAN_UP_ERROR in str(error):
        hidden = error.__context__
    return hidden or error


def describe_config_error(error: Exception, cfg: DictConfig | None) -> str | None:
    """Describe a mistake in a run's settings; return ``None`` for any other exception."""
    if isinstance(error, InstantiationException):
        return _describe_build_error(error, cfg)
    info = read_error(error)
    if cfg is not None and (message := _describe_refused_arguments(error, cfg)):
        return message
    if isinstance(error, UserError) or info.user_line:
        return None
    if isinstance(error, MisconfigurationException):
        return missing_objective(str(error)) or str(error)
    if isinstance(error, ConfigAttributeError):
        return (
            f"The config has no {error.full_key}: another version of the library wrote it.\n"
            "Go back to that version, or use resume=null to start another run."
        )
    is_loading = any("connectors/checkpoint_connector" in line.filename for line in info.lines)
    if is_loading and cfg is not None and cfg.get("resume") is not None:
        return describe_misfit(Path(cfg.resume), info.message.rstrip(" .") + ".")
    return None


def _describe_refused_arguments(error: Exception, cfg: DictConfig) -> str | None:
    """Return the key and the error if ``__init__`` of a class, such as an optimizer's, raised."""
    running_codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    for key, node in targets(cfg):
        target: Any = get_object(node["_target_"]) if node.get("_partial_") else object
        code = getattr(getattr(target, "__init__", None), "__code__", None)
        if code in running_codes and not is_user_code(code.co_filename):
            texts = [f"{k}={v}" for k, v in node.items() if isinstance(v, str) and k[0] != "_"]
            note = f" ({', '.join(texts)} is text)" if isinstance(error, TypeError) else ""
            return f"{key}: {one_line(str(error))}{note if texts else ''}"
    return None


def _describe_build_error(error: InstantiationException, cfg: DictConfig | None) -> str:
    """Return the key of the object that could not be built, and the reason."""
    cause: BaseException = error
    key = str(error).partition("full_key: ")[2].strip() or "the config"
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, (InstantiationException, UserError)):
        return str(cause)
    info, node = read_error(cause), dict(targets(cfg)).get(key, {})
    unknown = re.search(r"got an unexpected keyword argument '(\w+)'", info.message)
    if unknown and unknown[1] in node:  # a class with **kwargs has passed the argument on
        hint = suggest(unknown[1], {*map(str, node)} - {unknown[1]})
        return f"{key}: {node['_target_']} has no argument {unknown[1]}.{hint}"
    if cure := cure_of_import(cause):
        return f"{'' if info.user_line else f'{key}: '}{info.headline}\n{cure}"
    if info.user_line:
        return f"{info.headline}\nThe error occurred while {key} was built. {SHOWS_TRACEBACK}"
    for pattern, hint in TRAINER_HINTS.items():
        if found := re.search(pattern, info.message):
            return hint.format(found[1])
    return f"{key}: {info.headline}"
