"""The file of API keys: a YAML or JSON list of entries (or `keys:` with one), read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from cluster.config.yaml_file import read_yaml
from cluster.errors import ConfigError
from cluster.security.identity import file_stamp
from cluster.security.keys import ANYONE, Caller, KeyEntry, KeyRing

log = logging.getLogger(__name__)
MAX_FILE_BYTES = 16 << 20
POLL_SECONDS = 1.0
SHOWN_NAMES = 5


def read_keys(path: Path) -> KeyRing:
    """Read the entries. Raises ConfigError, which names entries by number and field, never by content."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="api_keys_file") from error
    if size > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes", field="api_keys_file")
    content: Any = read_yaml(path, "api_keys_file")
    entries = content.get("keys") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ConfigError(
            f"{path} must hold a list of keys, such as baton keys new prints", field="api_keys_file"
        )
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
    """Checks callers against the newest readable file. Without a configured file every caller is accepted.

    `refresh` is called periodically. If the file is broken or missing, the keys of the last good one stay valid, and
    the error is logged once.
    """

    def __init__(
        self,
        path: Path | None,
        clock: Callable[[], float] = time.time,
        aliases: Mapping[str, str] = MappingProxyType({}),
        models: Collection[str] = (),
    ):
        """`aliases`: models by their further names, under which an entry would have no effect. `models`: by their names;
        what `model_limits` says of others has none either, but routers of other models may read the same file. Raises
        ConfigError."""
        self._path = path
        self._aliases, self._models = aliases, models
        self._clock = clock
        self._ring = KeyRing([])
        self._seen: tuple[int, int, int] | None = None
        if path is not None:
            self._seen = file_stamp(path)
            self._ring = self._read(path)
            log.info("%d API keys", len(self._ring))

    def _read(self, path: Path) -> KeyRing:
        ring = read_keys(path)
        for number, field, name in ring.named_models():
            if name in self._aliases:
                raise ConfigError(
                    f"{path}: entry {number}: {field}: {name!r} is another name of model {self._aliases[name]!r}; "
                    "use that one",
                    field="api_keys_file",
                )
        self._warn_of_limits(path, ring)
        return ring

    def _warn_of_limits(self, path: Path, ring: KeyRing) -> None:
        named = {name: number for number, field, name in ring.named_models() if field == "model_limits"}
        unknown = [name for name in named if self._models and name not in self._models]
        if unknown:
            shown = ", ".join(f"{name!r} (entry {named[name]})" for name in unknown[:SHOWN_NAMES])
            log.warning(
                "%s: model_limits of %d names have no effect at this router, which serves no model of that name: %s%s; "
                "requests for an adapter count for its model",
                path,
                len(unknown),
                shown,
                ", …" if len(unknown) > SHOWN_NAMES else "",
            )

    @property
    def on(self) -> bool:
        return self._path is not None

    def check(self, authorization: str) -> Caller:
        """Return the caller behind an `Authorization` value. Raises UnauthenticatedError."""
        if self._path is None:
            return ANYONE
        return self._ring.check(authorization, self._clock())

    def refresh(self) -> None:
        """Read the file if it has changed since the last read."""
        if self._path is None:
            return
        stamp = file_stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._ring = self._read(self._path)
            log.info("API keys were read again: %d", len(self._ring))
        except ConfigError as error:
            log.error("%s; the keys read before stay valid", error.message)
