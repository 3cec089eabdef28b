"""Lines of a batch: requests that are checked before any is sent, and answers of earlier runs.

Files are read line by line. What stays in memory is a digest of each `custom_id`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from baton.safe_files import beside, create
from cluster.errors import ConfigError

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_LINE_BYTES = 64 << 20
# An output line's, written and read: what a router with default settings holds of one answer, and more than any takes
MAX_ANSWER_BYTES = 256 << 20
MAX_ID_CHARS = 512
SHOWN_FAULTS = 10
# Every answer's line begins so: a file that ends in anything else is not cut.
ANSWER_START = b'{"id":"'
_FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True)
class Request:
    custom_id: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One line of the output file, without its response."""

    custom_id: str
    ok: bool


class _Fault(ValueError):
    """Why a line is none."""


def requests(file: Path) -> Iterator[Request]:
    """Read the requests of an input file. Raises ConfigError that names the line."""
    for number, line in _lines(file, "input", MAX_LINE_BYTES):
        try:
            yield _request(line)
        except _Fault as fault:
            raise ConfigError(f"{file}, line {number}: {fault}", field="input") from None


def check(file: Path, done: set[bytes]) -> tuple[int, int]:
    """Read a whole input file. Returns its requests, and how many of them are not in `done`.

    Raises ConfigError that names the lines: no request, or a `custom_id` once more.
    """
    seen: set[bytes] = set()
    left = count = 0
    faults: list[str] = []
    for number, line in _lines(file, "input", MAX_LINE_BYTES):
        try:
            request = _request(line)
            mark = digest(request.custom_id)
            if mark in seen:
                raise _Fault(f"custom_id {request.custom_id!r} is an earlier line's")
        except _Fault as fault:
            faults.append(f"line {number}: {fault}")
            if len(faults) == SHOWN_FAULTS:
                faults.append("…")
                break
            continue
        seen.add(mark)
        count += 1
        left += mark not in done
    if faults:
        raise ConfigError(f"{file} is not sent: " + "; ".join(faults), field="input")
    return count, left


def digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()


def cut_half_line(output: BinaryIO, name: Path) -> None:
    """Cut what follows the last newline of an open output file. Raises ConfigError if no batch has written that."""
    end = output.seek(0, os.SEEK_END)
    start = end
    while start > 0:
        block = max(0, start - (1 << 16))
        output.seek(block)
        newline = output.read(start - block).rfind(b"\n")
        if newline >= 0:
            start = block + newline + 1
            break
        start = block
    output.seek(start)
    rest = output.read(len(ANSWER_START))
    if rest != ANSWER_START[: len(rest)]:
        raise ConfigError(f"the last line of {name} is no answer of a batch", field="output")
    output.truncate(start)
    output.seek(0, os.SEEK_END)


def answers(file: Path) -> Iterator[tuple[Answer, bytes]]:
    """Read an output file. Raises ConfigError at a line that is no answer."""
    for number, line in _lines(file, "output", MAX_ANSWER_BYTES):
        try:
            fields = orjson.loads(line)
            response = fields["response"]
            ok = response is not None and response["status_code"] == 200
            yield Answer(str(fields["custom_id"]), ok), line
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(
                f"{file}, line {number} is no answer of a batch: name another file, or remove the line",
                field="output",
            ) from None


def drop_failed(file: Path) -> None:
    """Rewrite an output file without its failed requests: whole or not at all."""
    part = beside(file)
    try:
        with create(part, file.stat().st_mode & 0o777) as kept:
            for answer, line in answers(file):
                if answer.ok:
                    kept.write(line)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _lines(file: Path, field: str, most: int) -> Iterator[tuple[int, bytes]]:
    """Lines of at most `most` bytes, with their numbers; empty ones are left out."""
    try:
        source = file.open("rb")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", field=field) from error
    with source:
        number = 0
        while line := source.readline(most + 1):
            number += 1
            if len(line) > most:
                raise ConfigError(f"{file}, line {number} is longer than {most} bytes", field=field)
            if line.strip():
                yield number, line


def _request(line: bytes) -> Request:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _Fault(f"no JSON ({error})") from None
    if not isinstance(fields, dict):
        raise _Fault("no JSON object")
    if unknown := sorted(fields.keys() - _FIELDS):
        raise _Fault(f"unknown field {unknown[0]!r}")
    custom_id, body = fields.get("custom_id"), fields.get("body")
    checks: tuple[tuple[bool, Callable[[], str]], ...] = (
        (
            isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_ID_CHARS,
            lambda: f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters",
        ),
        (fields.get("method", "POST") == "POST", lambda: "method must be POST"),
        (fields.get("url") in PATHS, lambda: f"url must be one of {', '.join(PATHS)}"),
        (isinstance(body, dict), lambda: "body must be an object"),
        (not isinstance(body, dict) or not body.get("stream"), lambda: "a batch's answers are not streamed"),
    )
    for holds, fault in checks:
        if not holds:
            raise _Fault(fault())
    assert isinstance(custom_id, str) and isinstance(body, dict)
    try:
        orjson.dumps(body)
    except TypeError:  # its depth is bounded there, at a quarter of what is read
        raise _Fault("body is nested too deep") from None
    return Request(custom_id, fields["url"], body)
