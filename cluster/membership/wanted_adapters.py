"""The adapters that an administrator wants loaded besides those of the workers' settings: names and directories in Redis.

Each entry has a tag of its own, so that a directory that is loaded again under its name is read again. Every change of a
name has a number beside its entry, which stays when the entry is removed: workers and routers write back what an emptied
Redis has lost (known_adapters.py).
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from cluster.config.adapters import MAX_ADAPTERS, is_adapter_name
from cluster.errors import InvalidRequestError

MAX_PATH = 512
log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    path: str  # below the workers' lora_dir
    tag: str
    serving: tuple[str, ...] = ()  # names with which the workers of its model register; none: all workers

    @classmethod
    def new(cls, path: str, serving: Sequence[str] = ()) -> Wanted:
        return cls(path, secrets.token_hex(8), tuple(serving))

    def encode(self) -> str:
        return json.dumps(self if self.serving else self[:2])

    def is_for(self, served_model: str) -> bool:
        """Whether a worker that registers with this name is to load it."""
        return not self.serving or served_model in self.serving


def check_path(path: str) -> str:
    """Raises InvalidRequestError unless it leads to a directory below another one."""
    parts = PurePosixPath(path).parts
    if not parts or len(path) > MAX_PATH or path.startswith("/") or ".." in parts or not path.isprintable():
        raise InvalidRequestError(
            f"lora_path: a relative path below the workers' lora_dir, without .., of at most {MAX_PATH} characters",
            field="lora_path",
            limit=str(MAX_PATH),
        )
    return path


def parse(entries: Mapping[bytes, bytes]) -> dict[str, Wanted]:
    """The entries by name. What is not understood is left out: one wrong entry must not keep others from being loaded."""
    found = {}
    for name, entry in sorted(entries.items())[:MAX_ADAPTERS]:
        try:
            path, tag, *rest = json.loads(entry)
            serving = rest[0] if rest else []
            if not is_adapter_name(name.decode()) or type(tag) is not str or type(serving) is not list:
                raise ValueError("no name, tag and models")
            found[name.decode()] = Wanted(check_path(path), tag, tuple(map(str, serving)))
        except (ValueError, TypeError, AttributeError, RecursionError, InvalidRequestError) as error:
            log.debug("the entry of adapter %r is ignored: %r", name, error)
    return found
