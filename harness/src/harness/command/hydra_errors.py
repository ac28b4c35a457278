"""Turn errors of Hydra, OmegaConf and PyYAML into short messages with what to type instead.

In: an exception of these packages. Out: a ``UserError`` that suggests a similar key or choice, or
that has the exception's own first lines. ``compose`` and ``check`` use it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.command.config_files import choices, folders, groups, hydra_compose
from harness.display import display_path, quoted_override
from harness.errors import UserError
from harness.keys import is_within, last_part
from harness.suggestions import SYNONYMS, replacement, suggest

# Overrides of Lightning 1 and of scripts from its time, as patterns, and their replacements.
OLD_KEYS = {
    r"(trainer\.)?(num_)?gpus=0": "strategy=cpu",
    r"(trainer\.)?(num_)?gpus=[-\[\d].*": (
        "strategy=gpu for one GPU, or strategy=ddp trainer.devices=<number of GPUs>"
    ),
    r"(trainer\.)?distributed_backend=.*": "strategy=<ddp, dp, ...>",
    r"accelerator=.*": "strategy=cpu or strategy=gpu",
    r"strategy=ddp_cpu": "strategy=ddp trainer.accelerator=cpu",
}
# Keys that the library reads from every config: those of train.yaml, and those of the Trainer.
REQUIRED = (
    *("output_dir", "seed", "resume", "join_minutes", "checkpoint", "test", "objective"),
    *("mode", "model", "trainer", "callbacks", "logger", "gpus"),
)
TRAINER_KEYS = (
    *("accelerator", "devices", "strategy", "num_nodes", "sync_batchnorm", "fast_dev_run"),
    *("enable_progress_bar",),
)
CHECKPOINT = "Use resume=<run> to resume a run, or init=<file> to start from its weights."
NO_PACKAGE = " The first line of such a file must be # @package _global_"


@contextmanager
def explaining_errors(task: str, overrides: Sequence[str], conf: Path) -> Iterator[None]:
    """Turn an error of Hydra, OmegaConf or PyYAML in the block into a ``UserError``."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(_message(error, task, overrides, conf)) from error
    except OSError as error:
        if "Invalid loaded object type" not in str(error):
            raise
        raise UserError(f"{_without_keys(folders(conf, overrides))}.") from error
    except yaml.YAMLError as error:  # its text has the file and the line
        raise UserError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise UserError(
            "The defaults of a YAML file include that file itself, directly or through another, or "
            "an override is nested too deeply."
        ) from error


def _message(error: Exception, task: str, overrides: Sequence[str], conf: Path) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return _unknown_choice(group, choice, conf, error.options)
    if isinstance(error.__cause__, (ConfigKeyError, ConfigAttributeError)):
        return _unknown_key(str(error.__cause__.full_key), task, overrides, conf)
    if isinstance(error, OverrideParseException):
        key, equals, value = str(error.override).partition("=")
        form = (
            f"{error.override!r} is not of the form key=value. Leave out spaces, and close all "
            "brackets and quotes."
        )
        is_open = re.match(r"{|\[.*[^]]$|'.*[^']$|\".*[^\"]$", value)
        cure = f"\nTo set {key} to this text, type: {quoted_override(key, value)}"
        return form + cure if equals and not is_open else form
    if match := re.match(r"Ambiguous value for argument '(.+?)=(.+)'", str(error)):
        key, value = match.groups()
        return (
            f"{key}={value} has several values. For a list, type {key}=[{value}]\nFor a sweep, "
            f"type python {task}.py -m {key}={value}"
        )
    if match := re.search(r"In '\w+/\w+': Could not override '\w+@\w+\.\w+'\.", str(error)):
        return match[0] + NO_PACKAGE
    if match := re.search(r"(In '.+'): Could not override '.+@(\w+)'\.", str(error)):
        return f"{match[1]}: write override /{match[2]}: <choice>, with the slash."
    if match := re.match(r"(In '.+': )?Could not override '([\w/]+)'\. No match", str(error)):
        return f"{match[1] or ''}There is no group {match[2]}.{replacement(match[2])}"
    if "Cannot merge DictConfig with ListConfig" in str(error):
        found = re.match(r"In '.+': ", str(error))
        return (
            f"{found[0] if found else ''}there is a list in the place of keys.\nGive each entry a "
            "name, such as callbacks: {timer: {_target_: ...}}"
        )
    if "HydraConfig was not set" in str(error):
        where = f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) else ""
        return (
            f"{where}${{hydra:...}} has no value: Hydra does not start the "
            "runs.\nWrite ${run_dir} for the run's folder."
        )
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:  # OmegaConf refused a value: Hydra's error has no text, but its cause has
        cause = error.__cause__
        return (
            _message(cause, task, overrides, conf) if isinstance(cause, Exception) else repr(error)
        )
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        cure = "\nAdd that key to your conf/train.yaml, or write a value in place of the ${...}."
        return f"{error.full_key}: {lines[0]}" + cure * ("Interpolation key" in lines[0])
    return "\n".join(lines[:2])


def check_required_keys(task: str, cfg: DictConfig, conf: Path) -> None:
    """Raise a ``UserError`` if the YAML files lack keys that the library reads."""
    missing = [] if task != "train" else [key for key in REQUIRED if key not in list(cfg)]
    if OmegaConf.is_dict(trainer := cfg.get("trainer")):
        missing = missing or [f"trainer.{key}" for key in TRAINER_KEYS if key not in list(trainer)]
    if not missing:
        return
    lacks = f"The config has no {', '.join(missing)}.\n"
    if groups(conf).issuperset(missing):
        chosen = " ".join(f"{name}=<choice>" for name in missing)
        raise UserError(f"{lacks}Choose files of conf/: {chosen}")
    if missing[0] in ("trainer.accelerator", "trainer.devices"):
        raise UserError(f"{lacks}Choose a strategy, which sets them: strategy=<choice>")
    if missing[0].startswith("trainer."):
        raise UserError(f"{lacks}Write defaults: [default] into your file of conf/trainer/.")
    raise UserError(f"{lacks}Copy these keys of the template's conf/train.yaml into yours.")


def _without_keys(folders: Iterable[Path]) -> str:
    """Name the YAML files that hold one value, and no keys."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*.yaml"))]
    texts = {path: re.sub("#.*", "", path.read_text(errors="replace")).strip() for path in paths}
    names = [display_path(p) for p, text in texts.items() if re.fullmatch(r"[^:{\[\n]+", text)]
    return f"{' or '.join(names) or 'A YAML file'} has no keys, such as seed: 3"


def _unknown_choice(group: str, choice: str, conf: Path, options: Iterable[str] | None) -> str:
    """Return the message for a choice that does not exist, with the files of its group."""
    if not group:
        return f"There is no conf/{choice}.yaml."
    root, _, inner = group.partition("/")
    if root != inner in groups(conf) and group not in groups(conf):
        return f"There is no group {group}. In defaults, write: override /{inner}: {choice}"
    name = Path(choice).stem
    if name in choices(conf, root) and (name != choice or inner == root):
        return f"There is no conf/{group}/{choice}.yaml. Write {name}, without folder and ending."
    choice = choice.removesuffix(".yaml")
    if (file := conf / group / f"{choice}.yml").exists():
        return f"{group}={choice}: rename {display_path(file)} to {choice}.yaml."
    # Hydra has no options for a group that takes a list. Files that begin with _ are not choices.
    names = [name for name in options or choices(conf, group) if not name.startswith("_")]
    return (
        f"{group}={choice}: there is no conf/{group}/{choice}.yaml."
        f"{replacement(f'{group}={choice}') or suggest(choice, names, prefix=f'{group}=')}\n"
        f"Choices: {', '.join(names)}."
    )


def _unknown_key(key: str, task: str, overrides: Sequence[str], conf: Path) -> str:
    """Return the message for a key that does not exist, with a similar key or a choice."""
    group, _, name = key.partition(".")
    if cure := replacement(key):
        return f"There is no key {key}.{cure}"
    pairs = [override.partition("=") for override in overrides]
    value = next((new_value for name, _, new_value in pairs if name == key), "<value>")
    matching = [name for name in groups(conf) if value in choices(conf, name)]
    if hint := suggest(key, matching):
        return f"There is no key {key}.{hint.replace('?', f'={value}?')}"
    by_group = {*groups(conf), "hydra.searchpath"}  # these choices add keys
    chosen = [o for o in overrides if o.partition("=")[0] in by_group and not re.search(",|={", o)]
    cfg = hydra_compose(task, chosen, conf)
    choice = name.partition(".")[0]
    if choice in choices(conf, group) and OmegaConf.select(cfg, f"{group}.{choice}") is None:
        return f"There is no key {key} without {group}={choice}. Add this override."
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(cfg, parent)
    if OmegaConf.is_dict(node) and last.isdigit() and int(last) in node:
        return f"The keys of {parent} are numbers. Write {parent}={{{last}:{value}}}"
    hint = suggest_key(key, cfg, conf)
    if not name:  # nothing would read +key
        return f"There is no key {key}.{hint or ' Write a key of your own into conf/train.yaml.'}"
    is_read = group in by_group and parent not in ("callbacks", "logger")  # entries need a _target_
    return f"There is no key {key}.{hint}" + f"\nTo add it, write +{key}={value}." * is_read


def suggest_key(key: str, cfg: DictConfig, conf: Path) -> str:
    """Suggest a key or group: one with the same last part or a synonym of it, or a similar one.

    Keys with the same parent come before other keys.
    """
    all_groups = groups(conf)
    if cure := replacement(key):
        return cure
    if inner := [name for name in all_groups if name.endswith(f"/{key}")]:
        return f" Did you mean {inner[0]}=<choice>?"
    keys = [name for name in _keys_below(cfg) if not is_within(name, [key])]
    keys = [name for name in keys if not is_within(key, [name])]
    parent, _, last = key.rpartition(".")
    siblings = [name for name in keys if parent and name.rpartition(".")[0] == parent]
    for name in (*siblings, *keys):
        if last_part(name) == SYNONYMS.get(last, last):
            return f" Did you mean {name}?"
    near = suggest(last, map(last_part, siblings), prefix=f"{parent}.")
    return near or suggest(key, [*keys, *all_groups])


def _keys_below(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key, child in node.items_ex(resolve=False):
        yield f"{prefix}{key!s}"
        if isinstance(child, DictConfig):
            yield from _keys_below(child, f"{prefix}{key!s}.")
