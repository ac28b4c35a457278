"""Find the weights in what was saved: a state_dict, one inside a checkpoint, a pickled module."""

from dataclasses import dataclass
from typing import Any

from .names import Names
from .tensors import CheckpointError, Tensor, parsing
from .unpickle import Inert

_KEYS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network")
_EMA_KEYS = ("state_dict_ema", "ema_state_dict", "model_ema", "ema_model", "ema")
WHOLE = "the whole file"
_MAX_WORK = 100_000_000  # of a pickled module: 100 for each name, and its characters


@dataclass
class Chosen:
    """The weights, as they are named in the file."""

    state: dict[str, Any]  # names and values, in order; not only Tensors
    key: str  # where they were, in words
    is_lightning: bool  # the names begin at a LightningModule, of which the network is a part
    is_exact: bool  # wrappers are already stripped, because their classes were known
    rest: list[str]  # the file's other entries
    metadata: dict[Any, Any]  # of a state_dict: it holds the modules' versions


@parsing("what it holds")
def choose(root: Any, key: str | None = None, ema: bool = True) -> Chosen:
    """Take the entry `key` (dotted for nested dicts), or the first that usually holds weights.

    With `ema`, averaged weights are preferred.

    Raises:
        CheckpointError: nothing there looks like weights; the message lists what there is.
    """
    root = _plain(root)
    entries = {k: _plain(v) for k, v in root.items()} if isinstance(root, dict) else {}
    if "ds_version" in entries and not key:
        raise CheckpointError("a part of a DeepSpeed checkpoint; run its zero_to_fp32.py first")
    if key:
        name, value = key, _plain(_lookup(root, key.split(".")))
    else:
        name, value = _usual(root, entries, ema)
    if not _is_weights(value):
        inside = ", ".join(f"{k} ({_describe(v)})" for k, v in list(entries.items())[:20])
        where = f"at --key {key}" if key else "in a usual place; name it with --key"
        raise CheckpointError(f"no weights {where}; it holds: {inside or _describe(root)}")
    is_pickled = isinstance(value, Inert)
    state = module_state(value) if is_pickled else value
    if not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{name} holds names that are not text")
    is_lightning = name != WHOLE and "pytorch-lightning_version" in entries
    if is_pickled:
        is_lightning = "prepare_data_per_node" in _fields(value)
    rest = [] if name == WHOLE else [str(entry) for entry in entries if entry != name]
    metadata = getattr(value, "metadata", None)
    return Chosen(
        {name: value for name, value in state.items() if value is not None},
        name,
        is_lightning,
        is_pickled,
        rest,
        metadata if isinstance(metadata, dict) else {},
    )


def _usual(root: Any, entries: dict[str, Any], ema: bool) -> tuple[str, Any]:
    """Return the name and the value of the usual entry, or of the only possible one."""
    if "current_model_state" in entries:  # Lightning's WeightAveraging: state_dict is the average
        name = "state_dict" if ema else "current_model_state"
        return name, entries.get(name)
    weights = {name: value for name, value in entries.items() if _is_weights(value)}
    averaged = [name for name in _EMA_KEYS if ema and name in weights]
    usual = [name for name in _KEYS if name in weights]
    others = [name for name in weights if name not in _EMA_KEYS]
    if usual or (len(others) == 1 and not _is_weights(root)):
        raw = (usual or others)[0]
        # An average of the parameters alone, or what holds the average, is not the weights.
        same = (n for n in averaged if _tensor_names(weights[n]) == _tensor_names(weights[raw]))
        name = next(same, raw)
        return name, weights[name]
    if averaged and not others and not _is_weights(root):
        return averaged[0], weights[averaged[0]]
    return WHOLE, root


def _tensor_names(weights: Any) -> set[str]:
    state = module_state(weights) if isinstance(weights, Inert) else weights
    names = [str(name) for name, value in state.items() if _is_tensor(value)]
    return set(Names(names, prefix="").new.values()) if names else set()


def _plain(value: Any) -> Any:
    """Return a dict of a class that is not known as a dict."""
    is_dict = isinstance(value, Inert) and not is_module(value) and value.items
    if is_dict and all(isinstance(item, tuple) and len(item) == 2 for item in value.items):
        return {name: item for name, item in value.items if isinstance(name, str)}
    return value


def _lookup(value: Any, path: list[str]) -> Any:
    """Follow a dotted path, where a key may itself contain dots."""
    for i in range(len(path), 0, -1):
        name = ".".join(path[:i])
        if isinstance(value, dict) and name in value:
            return _lookup(value[name], path[i:])
    return None if path else value


def _is_weights(value: Any) -> bool:
    if isinstance(value, Inert):
        return is_module(value)
    return isinstance(value, dict) and any(map(_is_tensor, value.values()))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or is_odd_tensor(value)


def is_odd_tensor(value: Any) -> bool:
    """Whether the value is a tensor of a kind that is not understood: sparse, quantized, ..."""
    odd = ("torch._utils._rebuild", "torch.nn.parameter.", "torch._tensor._rebuild")
    return isinstance(value, Inert) and value.name.startswith(odd)


def is_module(value: Inert) -> bool:
    """Whether the value is a pickled nn.Module, of whatever class."""
    return _inner(value) is not value or isinstance(_fields(value).get("_modules"), dict)


def _fields(module: Inert) -> dict[str, Any]:
    return module.state if isinstance(module.state, dict) else {}


def _inner(module: Inert) -> Inert:
    """Return the module inside a wrapper of torch, or of a class derived from one, or itself."""
    fields = _fields(module)
    children, buffers = fields.get("_modules"), fields.get("_buffers")
    inside = None
    if module.name.endswith(".OptimizedModule") and isinstance(module.args, tuple):
        inside = next(iter(module.args), None)
    elif isinstance(children, dict) and list(children) == ["module"]:
        is_average = isinstance(buffers, dict) and "n_averaged" in buffers
        inside = children["module"] if is_average or "device_ids" in fields else None
    return inside if isinstance(inside, Inert) else module


def holds_tensors(value: Any, seen: set[int]) -> bool:
    """Whether tensors are anywhere in the value, except in what was `seen`, by its id."""
    todo = [value]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_tensor(value):
            return True
        if isinstance(value, Inert):
            todo += [value.args, value.state, value.items]
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
    return False


def module_state(root: Inert) -> dict[str, Any]:
    """Return the state_dict of a pickled module whose class need not exist."""
    state: dict[str, Any] = {}
    todo, work = [("", root)], 0
    while todo:
        prefix, module = todo.pop()
        fields, inner = _fields(module), _inner(module)
        parameters, buffers, children = (
            fields.get(kind) or {} for kind in ("_parameters", "_buffers", "_modules")
        )
        names = [*parameters, *buffers, *children]
        work += 100 + sum(100 + len(prefix) + len(name) for name in names)
        if work > _MAX_WORK:
            raise CheckpointError("damaged: its modules contain themselves")
        if inner is not module:
            todo.append((prefix, inner))
            continue
        hidden = fields.get("_non_persistent_buffers_set") or ()
        values = parameters | {n: value for n, value in buffers.items() if n not in hidden}
        state |= {f"{prefix}{name}": value for name, value in values.items()}
        modules = [(f"{prefix}{n}.", m) for n, m in children.items() if isinstance(m, Inert)]
        todo += reversed(modules)
    return state


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, Inert):
        return value.name
    if isinstance(value, dict):
        return f"dict of {len(value)}"
    return type(value).__name__
