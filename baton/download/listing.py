"""The files of a repository of the Hub: names, sizes and hashes."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError

# Files that engine and tokenizer read; repositories also hold other formats of the same weights.
WANTED = (".safetensors", ".json", ".jinja", ".txt", ".model")
CHUNK_BYTES = 1 << 20

MAX_NAME_BYTES = 200  # file systems allow 255, and a partial file has a longer name
MAX_FILE_BYTES = 1 << 50


@dataclass(frozen=True)
class Repository:
    """`hf://ORG/NAME@REVISION`."""

    name: str
    revision: str

    @classmethod
    def parse(cls, source: str) -> Repository:
        """Raises ConfigError."""
        path, _, revision = source.removeprefix("hf://").partition("@")
        parts = path.split("/")
        if not source.startswith("hf://") or len(parts) != 2 or not all(parts):
            raise ConfigError(f"{source!r} is not hf://ORG/NAME or hf://ORG/NAME@REVISION", field="source")
        return cls(path, revision or "main")


@dataclass(frozen=True)
class HubFile:
    path: str
    size: int
    sha256: str  # empty if the Hub provides a git hash
    git_sha1: str

    def matches(self, file: Path, checked: Callable[[int], None]) -> bool:
        """Whether a file has this size and hash. A link never matches, because its target may change. `checked` gets the
        number of bytes after each read."""
        if file.is_symlink() or not file.is_file() or file.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(f"blob {self.size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                digest.update(chunk)
                checked(len(chunk))
        return digest.hexdigest() == (self.sha256 or self.git_sha1)


def manifest_digest(files: Sequence[HubFile]) -> str:
    """SHA-256 of the sorted lines `hash  path`, which pins a revision's contents independent of the server."""
    lines = sorted(f"{one.sha256 or one.git_sha1}  {one.path}\n" for one in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_listing(raw: bytes) -> tuple[str, list[HubFile]]:
    """Return a revision's commit and files from the Hub's description. Raises ValueError for any other content."""
    try:
        described = json.loads(raw)
        files = [_described(one) for one in described["siblings"] if _is_wanted(str(one["rfilename"]))]
        _check_names([one.path for one in files])
        return str(described["sha"]), files
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(repr(error)) from error


def _is_wanted(path: str) -> bool:
    return path.endswith(WANTED) and "/" not in path


def _described(one: dict[str, Any]) -> HubFile:
    large = one.get("lfs") or {}
    path, size = str(one["rfilename"]), large.get("size", one.get("size", 0))
    if not path.isprintable() or len(path.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"a file has the name {path[:MAX_NAME_BYTES]!r}")
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        raise ValueError(f"{path} has {str(size)[:40]} bytes, not 0 to {MAX_FILE_BYTES}")
    return HubFile(path, size, str(large.get("sha256", "")), str(one.get("blobId", "")))


def _check_names(paths: Sequence[str]) -> None:
    """Raise ValueError for two names that are one file where the file system ignores case or Unicode's normal form."""
    seen: dict[str, str] = {}
    for path in paths:
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())
        if folded in seen:
            raise ValueError(
                f"{seen[folded]!a} and {path!a} are one file where a file system ignores case or Unicode's normal form"
            )
        seen[folded] = path
