"""Makes values.schema.json and the README's table from the comments of values.yaml.

A comment right above a key is its description; in it, a line `# @ minimum: 1, enum: [a, b]` adds JSON Schema
keywords. Types come from the defaults. A mapping that has a `type` or `additionalProperties` of its own is a value
as a whole; every other mapping accepts its own keys and no others, but for one with `additionalProperties: true`. No key
may be missing whose value is not null: Helm takes a key away that is set to null, and `--reuse-values` has none of those
that are newer than the release. `# @ settings: router` is a mapping of the router's settings (or the worker's, the
autoscaler's): it accepts their names and no others, and leaves their values to the process.

    python deploy/helm/generate.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.cli.autoscale import AutoscaleConfig
from cluster.config.base import Frozen, settings
from cluster.config.router import RouterConfig
from cluster.config.worker import WorkerConfig

CHART = Path(__file__).resolve().parent / "baton"
BEGIN, END = "<!-- values: made by `make chart` from values.yaml -->", "<!-- end of values -->"
TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "string",
    "seq": "array",
    "map": "object",
}


# What `# @ quantity: true` stands for, an amount, and `# @ resources: true`, a container's resources. Kubernetes too
# refuses an amount that is no quantity, but names the object's field and not the value that it came from.
_QUANTITY = "^[0-9]*[.]?[0-9]+([eE][-+]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$"
_AMOUNTS = {
    "type": "object",
    "additionalProperties": {"type": ["string", "number"], "pattern": _QUANTITY},
}
_RESOURCES = {
    "type": "object",
    "properties": {"requests": _AMOUNTS, "limits": _AMOUNTS},
    "additionalProperties": False,
}

# What `# @ settings: …` stands for. The policy runs in `baton autoscale` or in Ray Serve, each with settings of its own.
_SETTINGS: dict[str, tuple[type[Frozen], ...]] = {
    "router": (RouterConfig,),
    "worker": (WorkerConfig,),
    "autoscaler": (AutoscaleConfig, ServeAutoscalingConfig),
}


class CommentError(Exception):
    """values.yaml can't be turned into a schema; the message names the key."""


@dataclass
class Value:
    """One key: its default, what is said of it, and the keys inside it unless it is a value as a whole."""

    path: tuple[str, ...]
    default: Any
    description: str
    keywords: dict[str, Any]
    anchor: int  # equal for the same mapping in several places
    children: list[Value] = field(default_factory=list)

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def name(self) -> str:
        return ".".join(self.path)


def read_values(text: str) -> list[Value]:
    """The keys of values.yaml in their order. Raises CommentError."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise CommentError("values.yaml holds no mapping")
    defaults = yaml.safe_load(text)
    return _children(root, defaults, (), text.splitlines())


def _children(
    node: yaml.MappingNode, defaults: dict[str, Any], path: tuple[str, ...], lines: list[str]
) -> list[Value]:
    found: dict[str, Value] = {}
    for key, value in node.value:
        if key.tag.endswith(":merge"):
            found |= {one.path[-1]: one for one in _children(value, defaults, path, lines)}
            continue
        name = str(key.value)
        found[name] = _value(value, defaults[name], (*path, name), key.start_mark.line, lines)
    return list(found.values())


def _value(node: yaml.Node, default: Any, path: tuple[str, ...], line: int, lines: list[str]) -> Value:
    description, keywords = _comment(lines, line, path)
    value = Value(path, default, description, keywords, id(node))
    whole = "type" in keywords or keywords.get("additionalProperties", True) is not True
    if isinstance(node, yaml.MappingNode) and node.value and not whole:
        value.children = _children(node, default, path, lines)
    elif "type" not in keywords:
        kind = node.tag.rpartition(":")[2]
        if kind not in TYPES:
            raise CommentError(
                f"{value.name}: say its type in a line `# @ type: …`, its default does not tell"
            )
        keywords["type"] = TYPES[kind]
    return value


def _comment(lines: list[str], line: int, path: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """The text and the schema keywords of the comment right above a key, at its indent."""
    indent = len(lines[line]) - len(lines[line].lstrip())
    first = line
    while first and lines[first - 1].startswith(" " * indent + "#"):
        first -= 1
    words: list[str] = []
    keywords: dict[str, Any] = {}
    for text in (one.strip() for one in lines[first:line]):
        if text.startswith("# @ "):
            try:
                keywords |= yaml.safe_load("{" + text[4:] + "}")
            except yaml.YAMLError as error:
                raise CommentError(f"{'.'.join(path)}: {text}: {error}") from error
        else:
            words.append(text.lstrip("# "))
    if keywords.pop("resources", False):
        keywords |= _RESOURCES
    if keywords.pop("quantity", False):
        keywords["pattern"] = _QUANTITY
    if (whose := keywords.pop("settings", None)) is not None:
        if whose not in _SETTINGS:
            raise CommentError(f"{'.'.join(path)}: settings: one of {', '.join(_SETTINGS)}")
        keywords |= {"type": "object", **_names(_SETTINGS[whose])}
    return " ".join(words), keywords


def _names(models: Iterable[type[Frozen]]) -> dict[str, Any]:
    """The names of their settings. One that holds further ones has no type: the templates' refusal of a value in its
    place says more than the schema's would."""
    names: dict[str, Any] = {"properties": {}, "additionalProperties": False}
    for setting in (one for model in models for one in settings(model)):
        holder = names
        for part in setting.path[:-1]:
            holder = holder["properties"].setdefault(part, {"properties": {}, "additionalProperties": False})
        described = {"description": setting.field.description} if setting.field.description else {}
        holder["properties"].setdefault(setting.path[-1], described)
    return names


def leaves(values: list[Value]) -> Iterator[Value]:
    for value in values:
        if value.is_leaf:
            yield value
        else:
            yield from leaves(value.children)


# --- values.schema.json ----------------------------------------------------------------------------------------


def make_schema(values: list[Value]) -> dict[str, Any]:
    """Draft 7, no reference leaves the file, no key that values.yaml lacks."""
    seen: dict[int, list[Value]] = {}
    _count(values, seen)
    shared = {
        anchor: found[0].path[-1] for anchor, found in seen.items() if len(found) > 1 and found[0].children
    }
    definitions = {shared[anchor]: _object(seen[anchor][0].children, shared) for anchor in shared}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Baton chart. Made by `make chart` from values.yaml.",
        **_object(values, shared),
        # Beside the properties, because `models` refers to these for what is set of them.
        "allOf": [_complete(values)],
        "definitions": definitions,
    }


def _complete(values: list[Value]) -> dict[str, Any]:
    """Every key is there that templates read without asking whether it is. Helm removes one whose value is null, its
    default too."""
    needed = [value.path[-1] for value in values if "null" not in value.keywords.get("type", ())]
    below = {value.path[-1]: _complete(value.children) for value in values if value.children}
    return {"required": needed, **({"properties": below} if below else {})}


def _count(values: list[Value], seen: dict[int, list[Value]]) -> None:
    for value in values:
        seen.setdefault(value.anchor, []).append(value)
        _count(value.children, seen)


def _object(values: list[Value], shared: dict[int, str]) -> dict[str, Any]:
    properties = {value.path[-1]: _schema(value, shared) for value in values}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema(value: Value, shared: dict[int, str]) -> dict[str, Any]:
    if value.anchor in shared:
        return {"$ref": f"#/definitions/{shared[value.anchor]}"}
    about = {"description": value.description} if value.description else {}
    if value.is_leaf:
        return {**about, **value.keywords, "default": value.default}
    return {**about, **_object(value.children, shared), **value.keywords}


# --- README.md -------------------------------------------------------------------------------------------------


def make_table(values: list[Value]) -> str:
    """One row per key. A value with several places is described at its first one, by which the others refer to it."""
    rows = ["| key | default | what it is |", "|---|---|---|"]
    first: dict[int, str] = {}
    for value in values:
        rows += _rows(value, first)
    return "\n".join(rows)


def _rows(value: Value, first: dict[int, str]) -> list[str]:
    described = first.setdefault(value.anchor, value.name)
    if value.is_leaf:
        if described != value.name:
            return []
        return [f"| `{value.name}` | {_code(value.default)} | {_about(value)} |"]
    if described != value.name:
        return [f"| `{value.name}.*` | | As `{described}.*`. |"]
    rows = [row for child in value.children for row in _rows(child, first)]
    as_before = len(rows) < len(value.children)
    heading = (
        f"{value.description} The keys not listed are as in the pool above."
        if as_before
        else value.description
    )
    return [f"| **`{value.name}`** | | {_escape(heading)} |", *rows] if heading else rows


def _about(value: Value) -> str:
    limits = []
    if "enum" in value.keywords:
        limits.append(", ".join(f"`{one}`" if one else "empty" for one in value.keywords["enum"]))
    for keyword, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤")):
        if keyword in value.keywords:
            limits.append(f"{sign} {value.keywords[keyword]}")
    said = _escape(value.description)
    return f"{said} ({'; '.join(limits)})".strip() if limits else said


def _code(default: Any) -> str:
    return "" if default in ("", None) else f"`{_escape(json.dumps(default, ensure_ascii=False))}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def with_table(readme: str, table: str) -> str:
    """The README with a new table between its marks. Raises CommentError where they are missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise CommentError(f"README.md lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def made_files() -> dict[Path, str]:
    """The files that `make chart` writes, with their content."""
    values = read_values((CHART / "values.yaml").read_text())
    schema = json.dumps(make_schema(values), indent=1, ensure_ascii=False) + "\n"
    readme = CHART / "README.md"
    return {CHART / "values.schema.json": schema, readme: with_table(readme.read_text(), make_table(values))}


def main(arguments: list[str]) -> int:
    files = made_files()
    stale = [file for file, text in files.items() if not file.exists() or file.read_text() != text]
    if "--check" in arguments:
        for file in stale:
            print(f"{file.name} is not what values.yaml says: run make chart", file=sys.stderr)
        return 1 if stale else 0
    for file in stale:
        file.write_text(files[file])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
