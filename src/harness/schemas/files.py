"""From the files of conf/ to one schema for each of its folders."""

import inspect
import json
import re
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import yaml

from harness.command.yaml_files import PACKAGE, explain_syntax
from harness.errors import UserError
from harness.run.targets import HYDRA_KEYS
from harness.schemas.signatures import DEFAULTS, OBJECT, REFERENCE, Schema, of_target

FOLDER = ".schemas"
HEAD: Schema = {"$schema": "http://json-schema.org/draft-07/schema#"}
# What an owner may choose beside the targets that conf/ has.
OFFERED = ("torch.optim", "torch.optim.lr_scheduler", "pytorch_lightning.callbacks")
NAMED = ("callbacks", "logger")  # objects below names that are free
OPEN = ("hydra", "rules")  # any keys below these


@dataclass
class Node:
    """What all files tell of one key."""

    keys: dict[str, "Node"] = field(default_factory=dict)
    targets: set[str] = field(default_factory=set)
    comment: str = ""
    is_defined: bool = False  # by more than an experiment, where it may be a typo


def write(root: Path) -> list[str]:
    """Write the schemas of a project's ``conf/``; return the targets that are not importable.

    Raises:
        UserError: with the place, where a file is no YAML.
    """
    found, missing = schemas(root / "conf")
    (root / FOLDER).mkdir(exist_ok=True)
    for name, schema in found.items():
        (root / FOLDER / name).write_text(
            json.dumps(schema, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        )
    return missing


def schemas(conf: Path) -> tuple[dict[str, Schema], list[str]]:
    """Every schema by its file's name, and the targets that are not importable.

    ``conf.json`` is that of a whole config. A folder's, as ``model.scheduler.json``, points to
    where in a config its files are; so do those of the parts at the top of conf/.

    Raises:
        UserError: with the place, where a file is no YAML.
    """
    tree, texts = Node(), {path: path.read_text() for path in sorted(conf.rglob("*.yaml"))}
    places: dict[str, set[str]] = {}
    for path, text in texts.items():
        folder = ".".join(path.parent.relative_to(conf).parts)
        header = PACKAGE.search(text)
        package = header[1].replace("_group_", folder) if header else folder
        names = [name for name in package.split(".") if name and name != "_global_"]
        file = folder or ".".join(names) or "conf"
        places.setdefault(file, set()).add("".join(f"/properties/{name}" for name in names))
        try:
            mapping = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise UserError(f"{path}: {explain_syntax(error)}") from error
        node = tree
        for name in names:
            node = node.keys.setdefault(name, Node())
            node.is_defined = True
        if isinstance(mapping, yaml.MappingNode):
            mapping.value = [pair for pair in mapping.value if pair[0].value != "defaults"]
            _add(node, mapping, [*text.splitlines(), ""], defines=bool(names or not folder))
    for name in re.findall(r"\$\{(\w+)[.}]", "".join(texts.values())):  # what some value reads
        tree.keys.setdefault(name, Node()).is_defined = True
    offered = {
        f"{module}.{name}"
        for module in OFFERED
        for name, value in vars(import_module(module)).items()
        if inspect.isclass(value) and not name.startswith("_")
    }
    offered |= {*re.findall(r"_target_: ([\w.]+)", "".join(texts.values()))}
    made = {target: of_target(target) for target in sorted(offered)}
    known = {target: schema for target, schema in made.items() if schema}
    whole = _schema(tree, "", known)
    cases = [
        {"if": {"properties": {"_target_": {"const": target}}, "required": ["_target_"]}}
        | {"then": {"$ref": f"#/definitions/{target}"}}
        for target in known
    ]
    targets = {"anyOf": [{"enum": [*made]}, {"type": "string"}]}
    anything = {"properties": {"_target_": targets}, "allOf": cases}
    definitions = {**known, "object": anything, "defaults": _defaults(conf, [*texts])}
    found = {
        f"{file}.json": {**HEAD, "anyOf": [{"$ref": f"conf.json#{p}"} for p in sorted(pointers)]}
        for file, pointers in places.items()
    }
    found["conf.json"] = HEAD | whole | {"definitions": definitions}
    return found, [target for target, schema in made.items() if schema is None]


def _add(node: Node, mapping: yaml.MappingNode, lines: list[str], defines: bool) -> None:
    for key, value in mapping.value:
        if key.value == "_target_":
            node.targets.add(value.value)
        if key.value in HYDRA_KEYS:
            continue
        child = node.keys.setdefault(key.value, Node())
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        end = (key if is_block else value).end_mark
        if comment := re.match(r":?\s+#\s*(.+)", lines[end.line][end.column :]):
            child.comment = child.comment or comment[1]
        if isinstance(value, yaml.MappingNode):
            _add(child, value, lines, defines)
        child.is_defined |= defines or bool(child.targets)


def _schema(node: Node, path: str, known: dict[str, Schema], is_argument: bool = False) -> Schema:
    """The schema of a key; an argument of a target has its type from there."""
    schema: Schema = {"description": node.comment} if node.comment else {}
    keys = {
        name: _schema(child, f"{path}.{name}".strip("."), known, bool(node.targets))
        for name, child in sorted(node.keys.items())
        if child.is_defined
    }
    if not keys and not node.targets:
        return schema
    schema["properties"] = {"defaults": DEFAULTS, **keys}
    if path.startswith(OPEN):
        return schema
    if not is_argument:
        schema |= {"type": ["object", "null", "string"], "pattern": REFERENCE["pattern"]}
    if node.targets:
        # With its target, a mapping has the keys of that one; without, those of all it has had.
        nested = {name for name, child in node.keys.items() if child.keys or child.targets}
        schema["properties"] = {name: key for name, key in keys.items() if name in nested}
        schema |= {"if": {"required": ["_target_"]}, "then": OBJECT}
        schema["else"] = _without_target(node.targets, keys, known)
    elif path in NAMED:
        schema["additionalProperties"] = OBJECT
    elif not is_argument:
        schema["additionalProperties"] = False
    return schema


def _without_target(targets: set[str], keys: dict[str, Schema], known: dict[str, Schema]) -> Schema:
    properties: dict[str, Schema] = {}
    schemas_of = {target: known.get(target, {"additionalProperties": True}) for target in targets}
    for target, schema in sorted(schemas_of.items()):
        for name in schema.get("properties", ()):
            one = properties.setdefault(name, {"anyOf": []})
            one["anyOf"].append({"$ref": f"#/definitions/{target}/properties/{name}"})
    is_open = any(schema["additionalProperties"] for schema in schemas_of.values())
    for name in keys if is_open else properties.keys() & keys:
        properties.setdefault(name, {})["description"] = keys[name].get("description", "")
    return {"properties": dict(sorted(properties.items())), "additionalProperties": False}


def _defaults(conf: Path, paths: list[Path]) -> Schema:
    """The list of choices at the head of a file; those that are made later pass as well."""
    keys = {
        f"{prefix}{folder.relative_to(conf).as_posix()}": {
            "anyOf": [{"enum": [path.stem for path in paths if path.parent == folder]}, {}]
        }
        for folder in sorted({path.parent for path in paths} - {conf})
        for prefix in ("", "override /")
    }
    entry = {"type": "object", "properties": keys, "minProperties": 1, "maxProperties": 1}
    return {"type": "array", "items": {"anyOf": [{"type": "string"}, entry]}}
