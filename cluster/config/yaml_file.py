"""Files that people write: YAML, of which JSON is a part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import ConfigError

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class _Loader(yaml.SafeLoader):
    """PyYAML takes the last of two values under one name, so a line would have no effect and no error. JSON writes a
    character beyond 16 bits as two escapes, of which PyYAML makes two surrogates: no text that can be sent or opened."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        found: set[tuple[str, str]] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):
                if (name.tag, name.value) in found:
                    raise _NamedTwice(name.start_mark.line + 1)
                found.add((name.tag, name.value))
        return node

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        return _PAIR.sub(_joined, value) if isinstance(value, str) else value


def _joined(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


class _NamedTwice(Exception):
    def __init__(self, line: int):
        self.line = line


def read_yaml(path: Path, field: str) -> Any:
    """Return the file's content. Raises ConfigError, whose text copies nothing of it: there may be secrets in it."""
    try:
        return yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field=field) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8", field=field) from error
    except yaml.YAMLError as error:
        # Without the parser's excerpt: it would copy a digest, or a key put there by mistake, into a log.
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        raise ConfigError(f"{path} is neither YAML nor JSON{line}", field=field) from None
    except _NamedTwice as error:
        raise ConfigError(
            f"{path} gives a name in line {error.line} that it has given beside it: keep one of the two",
            field=field,
        ) from None
    except (ValueError, RecursionError):  # a day that no month has; brackets without end
        raise ConfigError(f"{path} holds a value that YAML can't read", field=field) from None


def read_settings(path: Path) -> dict[str, Any]:
    """Values by name; of an empty file none. Raises ConfigError."""
    try:
        is_there = path.exists() and not path.is_dir()  # a pipe too: --config <(…)
    except (OSError, ValueError):  # a name that is none
        is_there = False
    if not is_there:
        raise ConfigError(f"no configuration file at {path}", field="config")
    content = read_yaml(path, "config")
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"{path} must hold settings, as name: value", field="config")
    return content
