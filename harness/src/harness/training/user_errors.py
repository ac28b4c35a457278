"""Show a mistake in a run's settings, or in its user's code, in one to three lines.

In: an exception. Out: while a run is built, a ``UserError``, which leaves no folder; later the
innermost line of the user's code or of a public package, its exception and one hint, which
``command.main`` prints. A bug of the harness keeps its traceback. Only a run that fails imports
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
from harness.files import LIBRARY
from harness.monitoring.objective import missing_score
from harness.suggestions import suggest
from harness.targets import targets
from harness.training import log_file
from harness.training.optimizer_states import refusal

LIBRARIES = (LIBRARY, Path(sysconfig.get_path("stdlib")).resolve())
LIGHTNING = ("pytorch_lightning", "lightning_fabric")  # what these raise themselves has a reason
# Packages in which an error of the harness itself may end: it calls them, or Lightning does for it.
CALLED = (
    *("torch", "torchmetrics", "lightning_utilities", "hydra", "omegaconf", "yaml", "numpy"),
    *("polars", "sklearn", "PIL", "rich", "matplotlib", "tensorboard", "packaging", "fsspec"),
    *("optuna", "pynvml", "onnx", "onnxruntime", "onnxscript"),
)
MAX_LENGTH = 300  # characters of a message, two lines of a screen
SHOWS_TRACEBACK = "HYDRA_FULL_ERROR=1 prints the traceback."
CLEAN_UP = "Please call `iter(combined_loader)` first"  # of Lightning, if loaders did not start
# The exception of a data worker or a dp replica arrives as text. Below a frame its line of code is
# indented, and the message is not.
FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
MESSAGE = re.compile(r"^([\w.]+)(?:: (.*))?", re.MULTILINE | re.DOTALL)
OUT_OF_MEMORY = (
    "CUDA out of memory|CUDA error: out of memory|STATUS_ALLOC_FAILED"
    "|DefaultCPUAllocator: (can't allocate|not enough) memory"
)
WORKER_KILLED = r"DataLoader worker \(pid.*(exited unexpectedly|killed by signal)"
# torch raises these in whichever line runs.
OF_NO_LINE = rf"shared memory|No space left on device: '/dev/shm|{WORKER_KILLED}"
HINTS = {  # by the message of torch or Lightning
    r"device-side assert": "Most often a label or an index is out of range; a GPU notices it later,"
        " at another line. strategy=cpu names the line.",
    r"Target -?\d+ is out of bounds": "A label must be smaller than the network's number of "
        "outputs, and not negative.",
    OUT_OF_MEMORY: "data.max_samples_per_device=<n> takes the same step in parts, as does trainer."
        "accumulate_grad_batches=2 with half a batch. Less memory: trainer.precision=bf16-mixed.",
    r"does not require grad": "The loss that training_step returns must come from trained "
        "parameters, without detach, item or no_grad. A validation or test that takes gradients "
        "itself needs +trainer.inference_mode=false.",
    r"implicitly created only for scalar|a loss of shape": "The loss that training_step returns "
        "must be one number: take its mean.",
    r"not used in producing|finished reduction in the prior iteration": "Some parameters have no "
        "part in the loss: use or freeze them, or trainer.strategy.find_unused_parameters=true.",
    r"mark a variable ready only once": "Checkpoint parts with use_reentrant=False, or, in another "
        "package's network, set +trainer.strategy.static_graph=true.",
    r"Expected more than 1 value per channel": "BatchNorm got one sample: leave out small batches "
        "(drop_last=True), use fewer devices, or trainer.sync_batchnorm=true under ddp.",
    r"stack expects each tensor to be|each element in list of batch|batch must contain tensors":
        "__getitem__ must return tensors or numbers, of one shape: pad or crop them there, or "
        "override collate.",
    r"returned `None`, this fit will run with no optimizer": "Return the optimizer; a module that "
        "trains nothing sets automatic_optimization = False and returns [].",
    r"on the same device": "Make tensors on self.device, or register them as buffers.",
    OF_NO_LINE: "A data worker has ended, for want of memory or of room in /dev/shm: use fewer "
        "data.num_workers, or 0, or give it more, as with docker run --shm-size=8g.",
}  # fmt: skip

ADVICE = {  # in place of the Trainer's message
    r"more than one stateful callback of type `(\w+)`": "callbacks: two of class {} have the same "
        "monitor, mode and interval, and Lightning cannot tell their states apart.\nGive one of "
        "them another monitor, or leave it out. To keep several checkpoints of one monitor: "
        "callbacks=top_k callbacks.checkpoint.save_top_k=<number>.",
    r"added multiple (progress bar) callbacks": "callbacks: there is more than one {}.\nLeave out "
        "all but one, or all of them with trainer.enable_progress_bar=false.",
}  # fmt: skip


class ErrorInfo(NamedTuple):
    """What an exception says and where it was raised."""

    kind: str  # name of its class
    message: str  # on one line
    lines: list[traceback.FrameSummary]  # from the outermost call to the line that raised it

    @property
    def user_line(self) -> str:
        """Return the user's innermost line below the first call of the harness, or "".

        A program or a test that calls the harness is not to blame.
        """
        ours = [LIBRARIES[0] in Path(line.filename).parents for line in self.lines]
        below = self.lines[ours.index(True) if any(ours) else 0 :]
        line = next((line for line in reversed(below) if is_users(line.filename)), None)
        return "" if line is None else place(display_path(line.filename), line)

    @property
    def package_line(self) -> str:
        """Return the line of a public package that raised, or whose call of torch did, or ""."""
        for line in reversed(self.lines):
            home, name = installed(line.filename)
            if name and name not in (*CALLED, *LIGHTNING, "lightning", "harness"):
                return place(str(Path(line.filename).resolve().relative_to(home)), line)
            if name not in CALLED and LIBRARIES[1] not in Path(line.filename).resolve().parents:
                return ""
        return ""

    @property
    def headline(self) -> str:
        """Return the line to blame, if there is one, and what was raised."""
        line = self.user_line or self.package_line
        return ": ".join(filter(None, [line, self.kind, self.message]))


def place(path: str, line: traceback.FrameSummary) -> str:
    """Return the file, the number and the function of a line."""
    where = f"{path}:{line.lineno}"
    return where if line.name == "<module>" else f"{where} in {line.name}"


def installed(file: str) -> tuple[Path, str]:
    """Return the folder that an installed package lies in and its name; "" for other code."""
    path = Path(file).resolve()
    for home in path.parents:
        if home.name.endswith("-packages"):
            return home, path.relative_to(home).parts[0].removesuffix(".py")
    return path, ""


def is_users(file: str) -> bool:
    """Return whether code belongs neither to a library, nor to the harness, nor is compiled."""
    path = Path(file).resolve()
    is_library = any(part.endswith("-packages") or "torchinductor" in part for part in path.parts)
    return not is_library and not {*LIBRARIES} & {*path.parents} and path.is_file()


def read_error(error: BaseException) -> ErrorInfo:
    """Read an exception; if it carries the text of a data worker's, read that."""
    kind, text = type(error).__name__, str(error)
    frames = list(FRAME.finditer(text))
    if isinstance(error, SyntaxError) and error.filename:
        at = traceback.FrameSummary(error.filename, error.lineno, "<module>")
        return ErrorInfo(kind, error.msg, [at])
    if frames and (match := MESSAGE.search(text, frames[-1].end())):
        found = [traceback.FrameSummary(frame[1], int(frame[2]), frame[3]) for frame in frames]
        return ErrorInfo(match[1].rpartition(".")[2], one_line(match[2] or ""), found)
    return ErrorInfo(kind, one_line(text), [*traceback.extract_tb(error.__traceback__)])


def one_line(text: str) -> str:
    """Shorten a text to two lines of a screen; CUDA's has advice below its first line."""
    words = " ".join((text.partition("\n")[0] if text.startswith("CUDA error") else text).split())
    return words if len(words) <= MAX_LENGTH else f"{words[:MAX_LENGTH]}..."


def describe_user_error(error: BaseException) -> str | None:
    """Describe a mistake in the user's code in one to three lines, and log its traceback.

    Returns:
        ``None`` if no line of the user's or of a public package is to blame, Lightning has not
        raised it, and there is no hint.
    """
    error = _cause(error)
    info = read_error(error)
    hint = next((HINTS[pattern] for pattern in HINTS if re.search(pattern, info.message)), "")
    last = Path(info.lines[-1].filename).parts if info.lines else ()
    is_others = info.user_line or info.package_line or not {*LIGHTNING}.isdisjoint(last)
    if isinstance(error, TrainingError) or not (hint or is_others):
        return None
    if re.search(OF_NO_LINE, info.message):
        info = info._replace(lines=[])
    elif worker := re.search(r"in DataLoader worker process (\d+)", str(error)):
        hint += f" In data worker {worker[1]}; data.num_workers=0 reads in this process."
    if re.search(OUT_OF_MEMORY, info.message):
        info = info._replace(message="out of memory")
    elif hint:  # in place of what the library advises
        info = info._replace(message=info.message.partition(". ")[0])
    path = log_file.write_traceback(error)
    where = f"The traceback is in {path} (HYDRA_FULL_ERROR=1 prints it)." if path else ""
    texts = [info.headline, hint.strip(), where or SHOWS_TRACEBACK]
    return "\n".join(filter(None, texts))


def _cause(error: BaseException) -> BaseException:
    """Return the exception that a clean-up, of Lightning or of a loader's threads, has hidden."""
    hidden: BaseException | None = error
    while hidden is not None and not re.search(WORKER_KILLED, str(hidden)):
        hidden = hidden.__context__
    if hidden is None and CLEAN_UP in str(error):
        hidden = error.__context__
    return hidden or error


def describe_config_error(error: Exception, cfg: DictConfig | None) -> str | None:
    """Describe a mistake in a run's settings; ``None`` if an exception is of something else."""
    if isinstance(error, InstantiationException):
        return _not_built(error, cfg)
    info = read_error(error)
    if cfg is not None and (message := _refused(error, cfg)):
        return message
    if isinstance(error, UserError) or info.user_line:
        return None
    if isinstance(error, MisconfigurationException):
        return missing_score(str(error)) or str(error)
    if isinstance(error, ConfigAttributeError):
        return (
            f"The config has no {error.full_key}: another version of the harness has written it.\n"
            "Go back to that version, or use resume=null to start another run."
        )
    is_loading = any("connectors/checkpoint_connector" in line.filename for line in info.lines)
    if is_loading and cfg is not None and cfg.get("resume") is not None:
        return refusal(Path(cfg.resume), info.message.rstrip(" .") + ".")
    return None


def _refused(error: Exception, cfg: DictConfig) -> str | None:
    """Name a library's class, such as an optimizer, that refused its arguments as it was built."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    for key, node in targets(cfg):
        built: Any = get_object(node["_target_"]) if node.get("_partial_") else object
        code = getattr(getattr(built, "__init__", None), "__code__", None)
        if code in codes and not is_users(code.co_filename):
            texts = [f"{k}={v}" for k, v in node.items() if isinstance(v, str) and k[0] != "_"]
            note = f" ({', '.join(texts)} is text)" if isinstance(error, TypeError) else ""
            return f"{key}: {one_line(str(error))}{note if texts else ''}"
    return None


def _not_built(error: InstantiationException, cfg: DictConfig | None) -> str:
    """Say why an object of the config could not be built."""
    cause: BaseException = error
    key = str(error).partition("full_key: ")[2].strip() or "the config"
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, (InstantiationException, UserError)):
        return str(cause)
    info, node = read_error(cause), dict(targets(cfg)).get(key, {})
    unknown = re.search(r"got an unexpected keyword argument '(\w+)'", info.message)
    if unknown and unknown[1] in node:  # a class with **kwargs has passed it on
        hint = suggest(unknown[1], {*map(str, node)} - {unknown[1]})
        return f"{key}: {node['_target_']} has no argument {unknown[1]}.{hint}"
    if info.user_line:
        return f"{info.headline}\nIt was built for {key}. {SHOWS_TRACEBACK}"
    for pattern, advice in ADVICE.items():
        if found := re.search(pattern, info.message):
            return advice.format(found[1])
    return f"{key}: {info.headline}"
