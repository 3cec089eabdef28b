"""Files in folders that other users may write to: links are not followed, partial files are never visible."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
SHARED = 0o644  # pods under other users read the same volume


def beside(path: Path) -> Path:
    """Return an unpredictable name in the same folder."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def create(path: Path, mode: int = PRIVATE) -> BinaryIO:
    """Create a file. Raises FileExistsError if the name exists, even as a dangling link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, mode), "wb")


def append(path: Path, *, truncate: bool = False, mode: int = PRIVATE) -> BinaryIO:
    """Open or create a file for appending. Raises OSError (ELOOP) if it is a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags | (os.O_TRUNC if truncate else 0), mode), "ab")


def replace(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Write the file whole or not at all; a link of its name is replaced, not followed. Raises OSError."""
    part = beside(path)
    output = create(part, mode)
    try:
        with output:
            output.write(content)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
