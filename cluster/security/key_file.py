"""The file of API keys: YAML or JSON, a list of entries (or `keys:` with one); read again when it changes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.config.yaml_file import read_yaml
from cluster.errors import ConfigError
from cluster.security.keys import ANYONE, Caller, KeyEntry, KeyRing

log = logging.getLogger(__name__)
MAX_FILE_BYTES = 16 << 20
POLL_SECONDS = 1.0


def read_keys(path: Path) -> KeyRing:
    """Raises ConfigError. Its text names entries by number and field, never by what they hold."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: {error}", field="api_keys_file") from error
    if size > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes", field="api_keys_file")
    content: Any = read_yaml(path, "api_keys_file")
    entries = content.get("keys") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ConfigError(f"{path} must hold a list of keys", field="api_keys_file")
    return KeyRing([_entry(path, number, one) for number, one in enumerate(entries, 1)])


def _entry(path: Path, number: int, value: Any) -> KeyEntry:
    try:
        return KeyEntry.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(
            f"{path}: entry {number}: {where or 'it'}: {problem['msg']}", field="api_keys_file"
        ) from None


class ApiKeys:
    """Checks callers against the newest file that could be read. Without a file everyone may come in.

    `refresh` is called now and then. A file that is broken or gone changes nothing: the keys of the last good one
    stay, and the log says so once.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time):
        self._path = path
        self._clock = clock
        self._ring = KeyRing([])
        self._seen: tuple[int, int, int] | None = None
        if path is not None:
            self._seen = _stamp(path)
            self._ring = read_keys(path)
            log.info("%d API keys", len(self._ring))

    @property
    def on(self) -> bool:
        return self._path is not None

    def check(self, authorization: str) -> Caller:
        """Raises UnauthenticatedError."""
        if self._path is None:
            return ANYONE
        return self._ring.check(authorization, self._clock())

    def refresh(self) -> None:
        """Reads the file if it is not the one read last."""
        if self._path is None:
            return
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._ring = read_keys(self._path)
            log.info("API keys were read again: %d", len(self._ring))
        except ConfigError as error:
            log.error("%s; the keys read before stay valid", error.message)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Which file it is. A symbolic link that now points elsewhere (a mounted secret) is another file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
